"""Whether there are blocks for a sequence, and who gives some up for it.

One that runs gets them whatever that takes: it is the order that says who yields. For one that
waits nobody who runs is preempted. Alone, it gets whatever can be freed; beside others it waits
until they have ended, and is not looked at again before there are more blocks than there were.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.flights import Flights
from quire.core.kv_cache import KVCache
from quire.core.roster import Roster
from quire.core.types import Sequence


class Room:
    """Helper of the scheduler's. watermark: share of the pool that is kept free beside others."""

    def __init__(self, kv: KVCache, roster: Roster, flights: Flights, watermark: float) -> None:
        self._kv = kv
        self._roster = roster
        self._flights = flights
        self._spared = int(watermark * kv.pool.size)
        self._stuck: tuple[Sequence, int] | None = None  # who lacked blocks when so many were there

    # -- for one that runs --------------------------------------------------------------------

    def make(self, seq: Sequence, n: int, preempt: Callable[[Sequence], None]) -> int:
        """Find blocks for n more tokens of a running sequence, whatever that takes.

        Returns for how many tokens there is room now: fewer than n only if it is first to yield
        itself; 0 if it was preempted, or has to wait for a step in flight.
        """
        kv, roster = self._kv, self._roster
        while not kv.grow(seq, n):
            if kv.missing(seq, n) <= kv.pool.available + kv.fence.blocks:
                return 0
            if roster.reclaim():
                continue
            victim = roster.order.victim(roster.running)
            if victim is not seq:
                preempt(victim)
            elif kv.room(seq) > 0:
                n = kv.room(seq)
            else:
                if not self._awaited:
                    preempt(seq)
                return 0
        return n

    # -- for one that waits -------------------------------------------------------------------

    def still_lacks(self, seq: Sequence) -> bool:
        """Whether it lacked blocks before, and there are no more now; saves looking again."""
        if self._stuck is None or self._stuck[0] is not seq or not self._busy:
            return False
        return self._kv.pool.available <= self._stuck[1]

    def suffices(self, seq: Sequence) -> bool:
        """Whether there are blocks for all its tokens; frees what nobody needs, if it is alone."""
        pool, spared = self._kv.pool, self._spared if self._roster.running else 0
        while self._kv.short_of(seq) > pool.available - spared:
            if self._busy or not self._roster.reclaim(sparing=seq):
                self._stuck = (seq, pool.available)
                return False
        self._stuck = None
        return True

    def take_share(self, seq: Sequence) -> bool:
        """Take its share from one that could not come in with it although nobody else is there.

        Copying what is shared takes more blocks than beginning anew.
        """
        if self._busy or not self._roster.spare.discard(seq):
            return False
        self._kv.release(seq, self._flights.step)
        return True

    @property
    def _busy(self) -> bool:
        """Whether there may be more blocks soon without taking them from anybody."""
        return bool(self._roster.running) or self._awaited

    @property
    def _awaited(self) -> bool:
        """Whether applying a step in flight will change what can be planned."""
        return self._kv.fence.blocks > 0 or self._flights.have_rows
