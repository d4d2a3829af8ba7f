"""`quire serve` whose engine and API processes have points for faults. Started by tests only.

    python -m tests.faults.serve FOLDER WORDS...     FOLDER: of a tests.faults.arming.Faults

The first process is quire's own; it starts children with a main() of ours, which wraps the points
and then is quire's.
"""

import importlib
import sys
from contextlib import contextmanager

from quire.engine.supervise import process_pipe
from tests.faults import points, ranks
from tests.faults.arming import Faults, install
from tests.server import running

CHILDREN = {
    "quire.engine.core.process_main": points.ENGINE,
    "quire.server.process.api_process": points.API,
}


def serve(folder, words):
    """The command."""
    start = process_pipe.spawn_process

    def start_ours(module, end, args=(), **more):
        if module not in CHILDREN:
            return start(module, end, args, **more)
        return start("tests.faults.serve", end, (module, folder, *args), **more)

    process_pipe.spawn_process = start_ours
    from quire.cli import main as quire

    return quire(["serve", *words])


def main(fd, module, folder, *args):
    """A child."""
    real = importlib.import_module(module)
    faults = Faults(folder)
    install(faults, CHILDREN[module])
    if CHILDREN[module] is points.ENGINE:
        ranks.install_in_engine(faults)
    return real.main(fd, *args)


@contextmanager
def serving(*words, **more):
    """A server as tests.server.running has it, and the Faults of its processes."""
    faults = Faults()
    try:
        starter = ("tests.faults.serve", str(faults.folder))
        with running.serving(*words, starter=starter, **more) as one:
            yield one, faults
    finally:
        faults.remove()


if __name__ == "__main__":
    raise SystemExit(serve(sys.argv[1], sys.argv[2:]))
