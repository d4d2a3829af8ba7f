"""Collectives between real processes over gloo are exact, and tapes repeat them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quire.distributed.collectives import ProcessGroupCollectives
from quire.distributed.counted_collectives import COUNTED_COLLECTIVES
from quire.kernels.add import add
from quire.kernels.native.op_tape import NotRecordableError, TapeRecorder
from tests import tiers


@pytest.mark.usefixtures("forked")
@pytest.mark.slow("a process for each rank")
@pytest.mark.parametrize("ranks", [3, *tiers.long(2)])
def test_sums_gathers_and_copies_between_processes_are_exact(ranks, tmp_path):
    command = [sys.executable, "-m", "tests.cpu.kernels.ranks", str(tmp_path / "rendezvous")]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        assert [process.communicate(timeout=120)[0] for process in started] == ["exact\n"] * ranks
    finally:
        for process in started:
            process.kill()


class Twins:
    """A group of two ranks with the same values."""

    def size(self):
        return 2

    def _allgather_base(self, out, x):
        out.view(2, -1).copy_(x)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.usefixtures("native_one")
def test_a_tape_repeats_and_counts_collectives_in_their_place():
    counter = memoryview(bytearray(16)).cast("q")
    x, comm = torch.randn(2, 64), ProcessGroupCollectives(Twins(), counter=counter)

    def run():
        total = comm.all_reduce(add(x, x))
        return add(total, total), comm.all_gather(total, 128)

    tape = TapeRecorder().record(run)
    assert counter[0] == 0
    for times in (1, 2, 3):
        x.normal_()
        doubled, gathered = tape.replay()
        assert torch.equal(doubled, 8 * x)
        assert torch.equal(gathered, torch.cat([4 * x, 4 * x], 1))
        assert counter.tolist() == [2 * times, COUNTED_COLLECTIVES.index("all_gather")]


@pytest.mark.usefixtures("native_one")
def test_a_tape_refuses_a_broadcast():
    x, comm = torch.zeros(2, 64), ProcessGroupCollectives(Twins())
    with pytest.raises(NotRecordableError):
        TapeRecorder().record(lambda: comm.broadcast(x))
