"""Startup timer: measures the stages of an engine's start.

The starting thread runs one stage after another (laps, whose sum is the whole start). Work of other
threads at the same time is listed separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import psutil

T = TypeVar("T")

CONCURRENT_PREFIX = "beside: "
"""Prefix of work in other threads: it is not part of the sum."""


class StartupTimer:
    """Laps of the starting thread, and the concurrent threads. A context: leaving ends them."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._concurrent: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="quire-start")
        self._since = time.perf_counter()
        process = psutil.Process()
        self.seconds_before = max(time.time() - process.create_time(), 0.0)
        """Seconds since the process started: the interpreter, imports, the caller's own code."""

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

        return self._pool.submit(timed)

    @property
    def total(self) -> float:
        return sum(self._laps.values())

    def seconds(self) -> dict[str, float]:
        """Return name -> seconds, in order; concurrent work comes last and is not in the sum."""
        run_concurrently = {
            CONCURRENT_PREFIX + name: value for name, value in self._concurrent.items()
        }
        return {**self._laps, **run_concurrently}


def format_table(seconds: dict[str, float], before: float) -> list[str]:
    """Format the times, one line per stage."""
    laps = {name: s for name, s in seconds.items() if not name.startswith(CONCURRENT_PREFIX)}
    beside = {
        name.removeprefix(CONCURRENT_PREFIX): s for name, s in seconds.items() if name not in laps
    }
    lines = [f"{name:<24}{value:7.2f} s" for name, value in laps.items()]
    lines.append(f"{'ready':<24}{sum(laps.values()):7.2f} s")
    lines += [f"  concurrent {name:<12}{value:7.2f} s" for name, value in beside.items()]
    lines.append(f"{'before (imports)':<24}{before:7.2f} s")
    return lines
