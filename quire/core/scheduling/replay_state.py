"""Replay state: brings a scheduler into the state in which a recording begins.

Used only by replays. It moves sequences through the same methods as the scheduler.
"""

from __future__ import annotations

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.drafting import Drafting, RecordedDrafts
from quire.core.scheduling.sequence_registry import SequenceRegistry


class ReplayState:
    """State of one scheduler, between two of its steps."""

    def __init__(self, kv: KVCache, registry: SequenceRegistry, drafting: Drafting) -> None:
        self._kv = kv
        self._registry = registry
        self._drafting = drafting

    def set_drafts(self, drafts: RecordedDrafts) -> None:
        """Set the drafts of the next plan."""
        self._drafting.recorded = drafts

    def length(self, request_id: str, index: int) -> int:
        """Number of tokens of a sequence; 0 if its request has ended."""
        group = self._registry.groups.get(request_id)
        return 0 if group is None else len(group.sequences[index].tokens)

    def finish_drafts(self, request_id: str, index: int, kept: int, more: list[int]) -> None:
        """Apply a row with drafts that was in flight when the recording began, as if it had yielded
        one token. kept: tokens that it yielded; `more` are those after the first."""
        seq = self._registry.groups[request_id].sequences[index]
        if not seq.row_drafts:
            return
        since, seq.row_drafts = seq.computed, 0
        if not kept:
            seq.tokens.pop()
        seq.tokens += more
        seq.computed = seq.planned = since + kept - 1
        self._kv.cache_full_blocks(seq, min(since, seq.computed))

    def start_running(self, request_id: str, index: int, computed: int, drafts: int = 0) -> None:
        """Start a waiting sequence, with `computed` tokens in the cache. drafts: of its row in
        flight."""
        kv, seq = self._kv, self._registry.groups[request_id].sequences[index]
        self._registry.remove_waiting(seq)
        self._registry.start_running(seq)
        seq.row_drafts = drafts
        if kv.allocate(seq, computed + drafts):
            seq.computed = seq.planned = computed
            kv.cache_full_blocks(seq, 0)

    def waits_without_blocks(self, request_id: str, index: int) -> bool:
        """Whether the sequence exists and holds no blocks."""
        group = self._registry.groups.get(request_id)
        return group is not None and not group.sequences[index].planned

    def restore_prefix(self, request_id: str, index: int, tokens: int) -> None:
        """Limit the prefix hit of a waiting sequence to its first `tokens` tokens."""
        self._kv.restore_prefix(self._registry.groups[request_id].sequences[index], tokens)

    def fill_pool(self, available: int) -> int:
        """Take blocks for unknown sequences until `available` are left. Returns the number."""
        pool = self._kv.pool
        surplus = max(pool.available - available, 0)
        return surplus if pool.allocate(surplus, offer=False) is not None else 0
