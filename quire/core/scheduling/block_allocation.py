"""Block allocator: finds blocks for a sequence, and frees those of others where needed.

Each data-parallel rank has its own: "running", "available" and so on are those of the rank.
A running sequence gets blocks by preemption if necessary; the queue's order chooses the victim.
A waiting sequence preempts nothing. Without running ones it gets all blocks that can be freed; else
it waits until there are more blocks than at its last attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import Row, Sequence, Wants


class BlockAllocator:
    """Helper of the scheduler. watermark: share of the pool kept free beside running rows."""

    def __init__(
        self,
        rank: int,
        kv: KVCache,
        registry: SequenceRegistry,
        inflight: InflightSteps,
        watermark: float,
    ) -> None:
        self._rank = rank
        self._kv = kv
        self._registry = registry
        self._inflight = inflight
        self._watermark_blocks = int(watermark * kv.pool.size)
        self._last_shortage: tuple[Sequence, int] | None = (
            None  # a sequence that lacked blocks, and the number available
        )

    # -- for running sequences ----------------------------------------------------------------

    def allocate_for_running(
        self, seq: Sequence, n: int, preempt: Callable[[Sequence], None]
    ) -> int:
        """Allocate blocks for n more tokens of a running sequence, preempting others if needed.

        Returns the number of tokens that have blocks now: fewer than n only if it would itself be
        the next victim; 0 if it was preempted, or has to wait for a step in flight.
        """
        kv, registry = self._kv, self._registry
        while not kv.allocate(seq, n):
            if kv.blocks_to_allocate(seq, n) <= kv.pool.available + kv.deferred_free.num_pending:
                return 0
            if registry.reclaim(self._rank):
                continue
            victim = registry.waiting_queue.choose_victim(registry.running_on(self._rank))
            if victim is not seq:
                preempt(victim)
            elif kv.token_capacity(seq) > 0:
                n = kv.token_capacity(seq)
            else:
                if not self._awaits_step:
                    preempt(seq)
                return 0
        return n

    # -- for waiting sequences ----------------------------------------------------------------

    def still_lacks_blocks(self, seq: Sequence) -> bool:
        """Whether it lacked blocks before, and there are no more now; avoids another attempt."""
        if (
            self._last_shortage is None
            or self._last_shortage[0] is not seq
            or not self._may_gain_blocks
        ):
            return False
        return self._kv.pool.available <= self._last_shortage[1]

    def ensure_blocks(self, seq: Sequence) -> bool:
        """Whether there are blocks for all its tokens; frees reclaimable ones if nothing runs."""
        pool, reserved = self._kv.pool, self._watermark_blocks if self._any_running else 0
        while self._kv.blocks_needed(seq) > pool.available - reserved:
            if self._may_gain_blocks or not self._registry.reclaim(self._rank, sparing=seq):
                self._last_shortage = (seq, pool.available)
                return False
        self._last_shortage = None
        return True

    def ensure_capacity(self, seq: Sequence, n: int) -> bool:
        """Whether there are blocks for its next n tokens at once, also where it would not keep all
        of them; frees reclaimable ones if nothing runs."""
        while self._kv.start_capacity(seq) < n:
            if self._may_gain_blocks or not self._registry.reclaim(self._rank, sparing=seq):
                return False
        return True

    def drop_shared_prefix(self, seq: Sequence) -> bool:
        """Free the shared blocks of a sequence that cannot start although nothing else runs.

        Copying shared blocks takes more blocks than recomputing from the start.
        """
        if self._may_gain_blocks or not self._registry.reclaimable[self._rank].discard(seq):
            return False
        self._registry.free_blocks(seq)
        return True

    @property
    def _may_gain_blocks(self) -> bool:
        """Whether more blocks may become free without a preemption."""
        return self._any_running or self._awaits_step

    @property
    def _any_running(self) -> bool:
        return self._registry.num_running(self._rank) > 0

    @property
    def _awaits_step(self) -> bool:
        """Whether applying a step in flight will change what can be planned."""
        return self._kv.deferred_free.num_pending > 0 or self._inflight.has_rows


def allocate_for_proposals(kvs: Seq[KVCache], rows: Seq[Row], proposals: int) -> None:
    """Allocate blocks for the keys of drafts that a model will make behind the rows, where there
    are enough. The next steps would need them too.

    proposals: drafts of each row; 0: no model makes any.
    """
    for row in rows if proposals else ():
        seq = row.seq
        if row.wants is Wants.TOKEN:
            more = min(row.drafts + proposals, seq.max_len - seq.planned)
            kvs[seq.dp_rank].allocate(seq, more)
