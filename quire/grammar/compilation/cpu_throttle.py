"""Lowers the priority of compile jobs that would slow an engine down.

On a core that an engine keeps busy a thread of low priority gets a hundredth of the time. So short,
rare jobs run at full priority, and only floods and long jobs run at low priority. Threads
have priorities of their own on Linux, and an unprivileged thread cannot raise its priority again:
what runs at low priority runs in a thread that ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

NICENESS = 19
BURST_S = 0.15
SHARE = 0.005
"""What the flood of one second may take at full speed of one core, once the burst is spent. Where
kernels use all cores, a step that meets it takes twice as long: so few do not show in a p99."""

POLL_S = 0.1
"""Interval at which the processor time of a thread is read."""
_TICKS = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


class CpuBudget:
    """Processor time at full speed: a burst, and then a share of the time that passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = BURST_S
        self._updated_at = clock()

    @property
    def left(self) -> float:
        """Seconds that the next one may take at full speed; none or fewer: it has to give way."""
        now = self._clock()
        self._left = min(BURST_S, self._left + (now - self._updated_at) * SHARE)
        self._updated_at = now
        return self._left

    def spend(self, seconds: float) -> None:
        """So much was taken."""
        self._left -= seconds


def lower_priority(thread: int | None = None, *, idly: bool = False) -> None:
    """Give a thread (by its native id; this one) the lowest priority until it ends.

    idly: it may starve, and leaves its core within microseconds when another thread is ready; a
    nice one may first use up a slice of milliseconds. Not for threads that hold locks.
    """
    number = threading.get_native_id() if thread is None else thread
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, number, NICENESS)
    if idly:
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(number, os.SCHED_IDLE, os.sched_param(0))


def run_throttled(work: Callable[[], T], allowance: CpuBudget, *, idly: bool = False) -> T:
    """What work() gives or raises, from a thread of its own that gives way beyond the allowance."""
    left = allowance.left
    done = _ThrottledRun(work, modestly=left <= 0, idly=idly)
    thread = threading.Thread(target=done.run, name="quire-grammar", daemon=True)
    thread.start()
    while left > 0:
        thread.join(min(left, POLL_S) + 0.001)
        if not thread.is_alive():
            break
        left = allowance.left - (_thread_cpu_seconds(thread) or 0.0)
        if left <= 0:
            lower_priority(thread.native_id, idly=idly)
    thread.join()
    allowance.spend(done.seconds)
    if done.error is not None:
        raise done.error
    return done.value[0]


class _ThrottledRun(Generic[T]):
    def __init__(self, work: Callable[[], T], *, modestly: bool, idly: bool) -> None:
        self._work = work
        self._low_priority, self._idle_priority = modestly, idly
        self.seconds = 0.0
        """Processor time at full speed, about."""
        self.value: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        if self._low_priority:
            lower_priority(idly=self._idle_priority)
        began = time.thread_time()
        try:
            self.value.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        if not self._low_priority:
            self.seconds = min(time.thread_time() - began, BURST_S)


def _thread_cpu_seconds(thread: threading.Thread) -> float | None:
    """Processor time of a thread; None where it is not available, or the thread has ended."""
    try:
        said = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
    except OSError:
        return None
    fields = said.rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
