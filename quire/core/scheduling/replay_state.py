"""Replay state: puts a scheduler into the state in which a recording begins.

Used by replays alone. It moves sequences through the same methods as the scheduler.
"""

from __future__ import annotations

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.sequence_registry import SequenceRegistry


class ReplayState:
    """Of one scheduler, between two of its steps."""

    def __init__(self, kv: KVCache, registry: SequenceRegistry) -> None:
        self._kv = kv
        self._registry = registry

    def start_running(self, request_id: str, index: int, computed: int) -> None:
        """Have a sequence run that waits, with so many tokens in the cache."""
        kv, seq = self._kv, self._registry.groups[request_id].sequences[index]
        self._registry.remove_waiting(seq)
        self._registry.start_running(seq)
        if kv.allocate(seq, computed):
            seq.computed = seq.planned = computed
            kv.cache_full_blocks(seq, 0)

    def waits_without_blocks(self, request_id: str, index: int) -> bool:
        """The sequence is here, and holds no blocks."""
        family = self._registry.groups.get(request_id)
        return family is not None and not family.sequences[index].tables[0]

    def restore_prefix(self, request_id: str, index: int, tokens: int) -> None:
        """Have the prefix cache know so many first tokens of one that waits, and no more."""
        self._kv.restore_prefix(self._registry.groups[request_id].sequences[index], tokens)

    def fill_pool(self, available: int) -> int:
        """Take blocks until only so many can be had, for who is not known here. How many."""
        pool = self._kv.pool
        surplus = max(pool.available - available, 0)
        return surplus if pool.allocate(surplus) is not None else 0
