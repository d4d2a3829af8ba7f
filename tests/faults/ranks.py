"""Ranks of a model that have points for faults: their processes start with a main() of ours."""

from contextlib import contextmanager

from quire.engine.startup import rank_process
from tests.faults.arming import Faults, install
from tests.faults.points import Point

POINTS = {
    "rank.start": Point("quire.engine.startup.rank_process:describe_model"),
    "rank.load": Point("quire.engine.startup.rank_process:load_model"),
    "rank.build": Point("quire.engine.startup.rank_process:build_runner"),
    "rank.forward": Point("quire.runner.cpu.cpu_worker:CpuWorker.attention_metadata"),
    "rank.reduce": Point("quire.kernels.collectives:all_reduce"),
    "rank.sample": Point("quire.sampling.sampler:Sampler.sample"),
    "rank.recover": Point("quire.runner.model_runner:ModelRunner.recover"),
}


def install_in_engine(faults, starter=rank_process):
    """Have ranks that this process starts look at the faults. Returns what undoes it.

    starter: the module that starts them.
    """
    start = starter.spawn_process

    def start_ours(module, end, args=(), **more):
        return start(__name__, end, (str(faults.folder), *args), **more)

    starter.spawn_process = start_ours

    def undo():
        starter.spawn_process = start

    return undo


@contextmanager
def of_ranks():
    """Faults for the ranks of engines in this process."""
    faults = Faults()
    undo = install_in_engine(faults)
    try:
        yield faults
    finally:
        undo()
        faults.remove()


def main(fd, folder):
    """A rank."""
    install(Faults(folder), POINTS)
    return rank_process.main(fd)
