"""Sequence starter: gives a waiting sequence a data-parallel rank, a slot and blocks.

A sequence that has blocks, of a fork, starts on the rank that has them. Any other starts on the
rank of least cost, in prompt tokens, that can run it:

    cost = tokens that running sequences have left to compute there + those of the sequence that
           are not cached there + SEQUENCE_COST * sequences that run there

It keeps its rank until it loses its blocks. It is a private helper of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set

from quire.core.kv.kv_cache import KVCache
from quire.core.media.item_rows import longest_undivided
from quire.core.scheduling.block_allocation import BlockAllocator
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.prompt_logprobs_buffer import PromptLogprobsBuffer
from quire.core.scheduling.scheduler_counters import SchedulerCounters
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import Sequence

SEQUENCE_COST = 128
"""Prompt tokens whose computation delays others about as much as a sequence does by its steps."""


class SequenceStarter:
    """Starts sequences of the queue, in plans."""

    def __init__(
        self,
        kvs: Seq[KVCache],
        allocators: Seq[BlockAllocator],
        registry: SequenceRegistry,
        inflight: InflightSteps,
        prompt_logprobs: PromptLogprobsBuffer,
        counters: SchedulerCounters,
    ) -> None:
        """kvs, allocators: of each rank."""
        self._kvs = kvs
        self._allocators = allocators
        self._registry = registry
        self._inflight = inflight
        self._prompt_logprobs = prompt_logprobs
        self._counters = counters
        self._pending = [0] * len(kvs)  # tokens that running sequences have left, of each rank
        self._reserved: set[int] = set()  # ranks on which no other sequence starts in this plan

    def begin_plan(self, short_ranks: Set[int]) -> None:
        """Begin to start sequences in a plan that has the rows of those that run.

        short_ranks: which have too few blocks for these.
        """
        if len(self._kvs) == 1:
            return
        self._reserved = {*short_ranks}
        self._pending = [0] * len(self._kvs)
        for seq in self._registry.running:
            self._pending[seq.dp_rank] += seq.pending

    def start(self, seq: Sequence, draft: PlanBuilder) -> bool:
        """Start a waiting sequence. Returns False, and changes nothing, if it cannot run."""
        if self._start_on_any(seq, draft):
            return True
        allocator = self._allocators[seq.dp_rank]
        return allocator.drop_shared_prefix(seq) and self._start_on_any(seq, draft)

    def reserve_rank(self, seq: Sequence) -> bool:
        """Let no other sequence start on the only rank that a refused one can start on, in this
        plan. Returns False if it has no such rank, or all ranks are reserved."""
        if not seq.planned:
            return False
        self._reserved.add(seq.dp_rank)
        return len(self._reserved) < len(self._kvs)

    def _start_on_any(self, seq: Sequence, draft: PlanBuilder) -> bool:
        for rank in self._candidates(seq):
            seq.dp_rank = rank
            if self._start_on_rank(seq, draft):
                self._pending[rank] += seq.pending
                return True
        return False

    def _candidates(self, seq: Sequence) -> Seq[int]:
        """Return the ranks on which it may start, the best first."""
        if len(self._kvs) == 1:
            return (0,)
        if seq.planned:
            free = self._registry.num_free_slots(seq.dp_rank) and seq.dp_rank not in self._reserved
            return (seq.dp_rank,) if free else ()
        prefix = not self._prompt_logprobs.needs_full_prompt(seq)
        costs = []
        for rank, kv in enumerate(self._kvs):
            if rank in self._reserved or not self._registry.num_free_slots(rank):
                continue
            uncached = len(seq.tokens) - (kv.find_prefix(seq) if prefix else 0)
            running = self._registry.num_running(rank)
            cost = self._pending[rank] + uncached + SEQUENCE_COST * running
            costs.append((uncached > kv.token_capacity(seq), cost, -kv.pool.available, rank))
        return [rank for *_, rank in sorted(costs)]

    def _start_on_rank(self, seq: Sequence, draft: PlanBuilder) -> bool:
        """Start it on its rank. Returns False, and changes nothing, if it cannot run there."""
        kv, allocator = self._kvs[seq.dp_rank], self._allocators[seq.dp_rank]
        fresh = not seq.planned
        if allocator.still_lacks_blocks(seq) or (fresh and not draft.may_start(seq)):
            return False
        if fresh:
            kv.match_prefix(seq, prefix=not self._prompt_logprobs.needs_full_prompt(seq))
        n = draft.allowed_tokens(seq)
        if n and not allocator.ensure_blocks(seq):
            n = 0
        if n and longest_undivided(seq.request) and not allocator.ensure_capacity(seq, n):
            n = draft.allowed_tokens(seq, most=kv.start_capacity(seq))
        if not n:
            if fresh:
                kv.release(seq, 0)
            return False
        loaded = kv.load_prefix(seq, self._inflight.next_step) if fresh else 0
        if fresh and not seq.preemptions and seq.request.read_prefix_cache:
            seq.cached, seq.loaded = seq.computed, loaded
            self._counters.count_lookup(seq, tiers=kv.host is not None)
        self._assign_slot(seq, draft)
        n = min(n, kv.token_capacity(seq))
        allocated = kv.allocate(seq, n)
        assert allocated, f"{seq.request.id} was admitted without blocks for {n} tokens"
        draft.add(seq, n)
        self._registry.fork_followers(seq)
        return True

    def _assign_slot(self, seq: Sequence, draft: PlanBuilder) -> None:
        """Assign a slot, and allocate its own blocks for shared ones."""
        copies = self._kvs[seq.dp_rank].copy_on_write(seq, self._inflight.next_step)
        assert copies is not None, f"{seq.request.id} was admitted without blocks to copy"
        draft.copies[seq.dp_rank] += copies
        self._registry.start_running(seq)
        draft.joins.append(seq)
