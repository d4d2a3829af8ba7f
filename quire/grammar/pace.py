"""Who may go at full speed beside an engine, and how somebody gives way to everybody.

A core that an engine keeps busy leaves next to nothing to one who gives way: a hundredth, or less.
So what comes now and then goes at full speed, and only what comes in floods, or takes long, is put
behind everybody else. Threads of a process have priorities of their own, on Linux; and nobody can
have his priority back, so what is to give way is done in a thread that ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

NICE = 19
BURST_S = 0.5
SHARE = 0.01
"""What the flood of one second may take at full speed of one core, once the burst is spent."""

T = TypeVar("T")


class Allowance:
    """Processor time at full speed: a burst, and then a share of the time that passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = BURST_S
        self._at = clock()

    @property
    def left(self) -> bool:
        """Whether the next one may go at full speed."""
        now = self._clock()
        self._left = min(BURST_S, self._left + (now - self._at) * SHARE)
        self._at = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """So much was taken."""
        self._left -= seconds


def give_way(thread: int | None = None) -> None:
    """Put a thread (by its native id; this one) behind everybody, for the rest of its life."""
    number = threading.get_native_id() if thread is None else thread
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, number, NICE)


def run(work: Callable[[], T], *, modestly: bool, most: float | None = None) -> T:
    """What work() gives or raises, from a thread of its own.

    modestly: it gives way from the beginning, otherwise when it has gone on for `most` seconds.
    """
    done = _Outcome(work, modestly=modestly)
    thread = threading.Thread(target=done.fill, name="quire-grammar", daemon=True)
    thread.start()
    if not modestly and most is not None:
        thread.join(most)
        if thread.is_alive() and thread.native_id is not None:
            give_way(thread.native_id)
    thread.join()
    if done.error is not None:
        raise done.error
    return done.value[0]


class _Outcome(Generic[T]):
    def __init__(self, work: Callable[[], T], *, modestly: bool) -> None:
        self._work = work
        self._modestly = modestly
        self.value: list[T] = []
        self.error: BaseException | None = None

    def fill(self) -> None:
        if self._modestly:
            give_way()
        try:
            self.value.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
