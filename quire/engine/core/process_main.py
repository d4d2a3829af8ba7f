"""Start of an engine process: waits for its orders in a thread, while the engine is imported.

So the CUDA driver starts at once, and a standby process has imported everything before its orders
come, as have processes for its ranks. quire.engine.supervise.process_launcher starts it;
quire.engine.core.process runs it.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

from quire.config.options import Options
from quire.engine.startup.early_ranks import start_early_ranks
from quire.engine.startup.early_start import begin_startup, early_device, early_rank_count
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.supervise.process_pipe import (
    ProcessPipe,
    RunEngine,
    ignore_signals,
    receive_orders,
)


def main(fd: int, ranks: str) -> int:
    """Run one engine, by the orders from the pipe. Returns the exit status.

    ranks: how many processes of ranks start before the orders come.
    """
    ignore_signals()
    start_early_ranks(int(ranks))
    is_imported = threading.Event()

    def start() -> tuple[ProcessPipe, RunEngine, StartupTimer] | None:
        inherited = receive_orders(fd, RunEngine, "quire-engine")
        if inherited is None:
            return None
        options = Options.from_flat(inherited[1].options)
        waited = 0.0 if is_imported.is_set() else None  # a standby process has only waited so far
        device, ranks = early_device(options), early_rank_count(options)
        return *inherited, begin_startup(device, ranks=ranks, before_s=waited)

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)
        process = importlib.import_module("quire.engine.core.process")
        is_imported.set()
        started = starting.result()
    return 1 if started is None else int(process.run(*started))
