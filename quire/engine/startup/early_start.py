"""Early start: begins the start-up work that needs neither torch nor the model, during imports."""

from __future__ import annotations

from quire import env
from quire.config.options import Options
from quire.engine.startup.early_ranks import start_early_ranks
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


def begin_startup(device: str, *, ranks: int = 0, before_s: float | None = None) -> StartupTimer:
    """Start the timer, and what takes long outside the interpreter. device: the option.

    ranks: processes of ranks that will start. before_s: as for StartupTimer.
    """
    timer = StartupTimer(before_s)
    if device != cpu.name and cuda.has_driver():
        start_early_ranks(ranks)
    if device != cpu.name:
        start_early_process(env.read().cache_dir)
        timer.run_concurrently(DRIVER, cuda.available)
        timer.run_concurrently("library pages", library_pages.read_ahead)
    return timer
