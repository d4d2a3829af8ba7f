"""Early start: begins the start-up work that needs neither torch nor the model, during imports."""

from __future__ import annotations

from functools import partial

from quire import env
from quire.config.options import Options
from quire.engine.startup.early_ranks import count_early_ranks, start_early_ranks
from quire.engine.startup.kernel_builder import start_early_process
from quire.engine.startup.startup_timer import StartupTimer
from quire.platform import cpu, cuda, library_pages

DRIVER = "CUDA driver"


def uses_ray(options: Options) -> bool:
    """Whether Ray places the ranks."""
    return options.parallel.distributed_executor_backend == "ray"


def early_device(options: Options) -> str:
    """Return the device for which the start can begin: none of a GPU that Ray will choose."""
    return cpu.name if uses_ray(options) else options.device.device


def early_rank_count(options: Options) -> int:
    """Return how many processes of ranks a start begins with: none without a GPU."""
    on_gpu = early_device(options) != cpu.name and cuda.has_driver()
    return count_early_ranks(options.parallel) if on_gpu else 0


def begin_startup(device: str, *, ranks: int = 0, before_s: float | None = None) -> StartupTimer:
    """Start the timer, and what takes long outside the interpreter. device: the option.

    ranks: see early_rank_count(). before_s: as for StartupTimer.
    """
    timer = StartupTimer(before_s)
    if ranks:
        start_early_ranks(ranks)
    if device != cpu.name:
        start_early_process(env.read().cache_dir)
        timer.run_concurrently(DRIVER, cuda.available)
        pages = partial(library_pages.read_ahead, ranks=ranks > 0)
        timer.run_concurrently("library pages", pages)
    return timer
