"""Startup timer: measures the stages of an engine's start.

The starting thread runs one stage after another (laps, whose sum is the whole start). Work of other
threads at the same time is listed separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

CONCURRENT_PREFIX = "beside: "
"""Prefix of work in other threads: it is not part of the sum."""


class StartupTimer:
    """Laps of the starting thread, and the concurrent threads. A context: leaving ends them."""

    def __init__(self, before_s: float | None = None) -> None:
        """before_s: seconds that count as the time before. None: since the process started."""
        self._laps: dict[str, float] = {}
        self._concurrent: dict[str, float] = {}
        self._futures: dict[str, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="quire-start")
        self._since = time.perf_counter()
        self.seconds_before = process_age() if before_s is None else before_s
        """Seconds before the first stage: the interpreter, the caller's own code and imports."""

    def __enter__(self) -> StartupTimer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=error is not None)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to this stage."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._since
        self._since = now

    def run_concurrently(self, name: str, function: Callable[[], T]) -> Future[T]:
        """Run this in another thread, and measure its time."""

        def timed() -> T:
            began = time.perf_counter()
            try:
                return function()
            finally:
                self._concurrent[name] = time.perf_counter() - began

        future = self._futures[name] = self._pool.submit(timed)
        return future

    def add_concurrent(self, name: str, seconds: float) -> None:
        """Add work of another process."""
        self._concurrent[name] = seconds

    def wait_for(self, name: str) -> None:
        """Wait for this concurrent work, if there is any, as a stage of its own."""
        future = self._futures.get(name)
        if future is not None:
            future.result()
            self.lap(f"{name} wait")

    @property
    def laps(self) -> dict[str, float]:
        """name -> seconds of the stages of the starting thread, in order."""
        return dict(self._laps)

    @property
    def total(self) -> float:
        return sum(self._laps.values())

    def seconds(self) -> dict[str, float]:
        """Return name -> seconds, in order; concurrent work comes last and is not in the sum."""
        run_concurrently = {
            CONCURRENT_PREFIX + name: value for name, value in self._concurrent.items()
        }
        return {**self._laps, **run_concurrently}


def process_age() -> float:
    """Seconds since this process started."""
    started: float = psutil.Process().create_time()
    return max(time.time() - started, 0.0)


def format_table(seconds: dict[str, float], before: float) -> list[str]:
    """Format the times, one line per stage."""
    laps, beside = _split(seconds)
    lines = [f"{name:<32}{value:7.2f} s" for name, value in laps.items()]
    lines.append(f"{'ready':<32}{sum(laps.values()):7.2f} s")
    lines += [f"  concurrent {name:<19}{value:7.2f} s" for name, value in beside.items()]
    lines.append(f"{'before':<32}{before:7.2f} s")
    return lines


def format_server_start(total: float, seconds: dict[str, float], opening: float) -> str:
    """Format the whole start of a server in one line, whose parts add up.

    total: seconds from the start of the command until all accept connections. seconds: of the
    engine. opening: seconds after the engine was ready.
    """
    laps, _ = _split(seconds)
    before = total - sum(laps.values()) - opening  # the command, and the engine's interpreter
    parts = {"before": before, **laps, "opening": opening}
    stages = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    return f"ready {total:.2f} s after the command started: {stages}"


def _split(seconds: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the stages, and the concurrent work by its name."""
    laps = {name: s for name, s in seconds.items() if not name.startswith(CONCURRENT_PREFIX)}
    beside = {
        name.removeprefix(CONCURRENT_PREFIX): s for name, s in seconds.items() if name not in laps
    }
    return laps, beside
