"""Startup timer: names every second of an engine's start.

The thread that starts an engine does one thing after another (laps, which add up to the whole);
what other threads do at the same time is listed beside them.
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
"""Prefix of what ran in other threads meanwhile: not part of the sum."""


class StartupTimer:
    """Laps of the starting thread, and the threads beside it. A context: leaving ends them."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._concurrent: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="quire-start")
        self._since = time.perf_counter()
        process = psutil.Process()
        self.seconds_before = max(time.time() - process.create_time(), 0.0)
        """Seconds the process was there already: the interpreter, imports, the user's own."""

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
        """All since the last lap was spent on this."""
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._since
        self._since = now

    def run_concurrently(self, name: str, function: Callable[[], T]) -> Future[T]:
        """Do this in another thread, and note how long it took."""

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
        """Name -> seconds, in order; what was done beside comes last and is not in the sum."""
        run_concurrently = {
            CONCURRENT_PREFIX + name: value for name, value in self._concurrent.items()
        }
        return {**self._laps, **run_concurrently}


def format_table(seconds: dict[str, float], before: float) -> list[str]:
    """The receipt for people, one line per name."""
    laps = {name: s for name, s in seconds.items() if not name.startswith(CONCURRENT_PREFIX)}
    beside = {
        name.removeprefix(CONCURRENT_PREFIX): s for name, s in seconds.items() if name not in laps
    }
    lines = [f"{name:<24}{value:7.2f} s" for name, value in laps.items()]
    lines.append(f"{'ready':<24}{sum(laps.values()):7.2f} s")
    lines += [f"  meanwhile {name:<12}{value:7.2f} s" for name, value in beside.items()]
    lines.append(f"{'before (imports)':<24}{before:7.2f} s")
    return lines
