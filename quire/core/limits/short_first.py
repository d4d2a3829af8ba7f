"""Prompts share a step: short ones first, and the eldest always gets a quarter.

Without it whoever came aboard first takes all that a step has for prompts, and a question of ten
tokens waits for the end of a book. Here each leaves room for those who have less to compute: others
aboard, and the first of those who wait. The eldest unfinished prompt keeps a quarter of the step
whatever comes, so that none starves: it ends, and the next is the eldest.

Room that is left for those who wait is lost if they do not come (no seat, no blocks). So after a
step in which none came, none is left for them for a while, and longer each time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.order.base import Order
from quire.core.types import Sequence, State

LOOK = 8
"""So many of those who wait are looked at."""
QUARTER = 0.25
LONGEST_PAUSE = 31


class ShortFirst(Limit):
    """queue: who waits. room: tokens of prompts that the limits before leave in this step.

    After those limits.
    """

    def __init__(self, queue: Order, room: Callable[[], int]) -> None:
        self._queue = queue
        self._room = room
        self._aboard: dict[Sequence, None] = {}  # whose prompts come in parts, eldest first
        self._heads: list[Sequence] = []  # those who wait, for whom room was left
        self._eldest: Sequence | None = None
        self._claims: dict[Sequence, int] = {}  # tokens that those who had none yet could use
        self._least = 0  # for the eldest
        self._pause = self._paused = 0

    def begin(self, sequences: int) -> None:
        self._aboard = {s: None for s in self._aboard if s.state is State.RUNNING and _prefills(s)}
        self._count_pause()
        first = [] if self._paused or not len(self._queue) else islice(self._queue, LOOK)
        self._heads = [seq for seq in first if _prefills(seq)]
        self._claims = {}
        if len(self._aboard) + len(self._heads) > 1:
            self._claims = {seq: seq.pending for seq in (*self._aboard, *self._heads)}
        self._eldest = next(iter(self._claims), None)
        self._least = int(max(self._room(), 0) * QUARTER)

    def allow(self, seq: Sequence, want: int) -> int:
        if not self._claims or want <= 1 or not _prefills(seq):
            return want
        own = seq.pending
        shorter = sum([n for one, n in self._claims.items() if n < own])
        left = self._room() - shorter
        if seq is self._eldest:
            left = max(left, self._least, 1)
        elif self._eldest in self._claims and self._claims[self._eldest] > own:
            left -= self._least
        return max(min(want, left), 0)

    def take(self, seq: Sequence, n: int) -> None:
        self._claims.pop(seq, None)
        if n < seq.pending:
            self._aboard[seq] = None

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._aboard or seq in self._heads:
            self._claims[seq] = seq.pending

    def slack(self) -> int:
        return NO_BOUND

    def _count_pause(self) -> None:
        """Those for whom room was left in the step before: has one of them come?"""
        if self._paused:
            self._paused -= 1
        elif self._heads and self._aboard:
            came = any(seq.state is not State.WAITING for seq in self._heads)
            self._pause = 0 if came else min(2 * self._pause + 1, LONGEST_PAUSE)
            self._paused = self._pause


def _prefills(seq: Sequence) -> bool:
    """It has more to compute than the next token."""
    return seq.pending > 1 or seq.planned < seq.prompt_len
