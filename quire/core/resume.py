"""Puts a scheduler into the middle of things: what a recording that begins there needs.

For replays only. Like the scheduler it moves sequences, by what cache and roster offer to both.
"""

from __future__ import annotations

from quire.core.kv_cache import KVCache
from quire.core.roster import Roster


class Resume:
    """Of one scheduler, between two of its steps."""

    def __init__(self, kv: KVCache, roster: Roster) -> None:
        self._kv = kv
        self._roster = roster

    def seat(self, request_id: str, index: int, computed: int) -> None:
        """Have a sequence run that waits, with so many tokens in the cache."""
        kv, seq = self._kv, self._roster.families[request_id].sequences[index]
        self._roster.take_out(seq)
        self._roster.seat(seq)
        if kv.grow(seq, computed):
            seq.computed = seq.planned = computed
            kv.publish(seq, 0)

    def waits_anew(self, request_id: str, index: int) -> bool:
        """The sequence is here, and holds no blocks."""
        family = self._roster.families.get(request_id)
        return family is not None and not family.sequences[index].tables[0]

    def know(self, request_id: str, index: int, tokens: int) -> None:
        """Have the prefix cache know so many first tokens of one that waits, and no more."""
        self._kv.lay_back(self._roster.families[request_id].sequences[index], tokens)

    def fill_up(self, available: int) -> int:
        """Take blocks until only so many can be had, for who is not known here. How many."""
        pool = self._kv.pool
        surplus = max(pool.available - available, 0)
        return surplus if pool.take(surplus) is not None else 0
