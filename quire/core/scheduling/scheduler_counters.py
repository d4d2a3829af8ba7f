"""Scheduler counters: count preemptions, prefix hits and failures since the start."""

from __future__ import annotations

import logging

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduler_stats import SchedulerStats
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import Sequence, SequenceState

log = logging.getLogger(__name__)

WARN_EVERY = 50
"""Preemptions between two warnings; the first one is logged too."""


class SchedulerCounters:
    """Written by the scheduler."""

    __slots__ = (
        "corrupt_rows",
        "failed_requests",
        "failed_steps",
        "hit_tokens",
        "preemptions",
        "query_tokens",
    )

    def __init__(self) -> None:
        self.preemptions = 0
        self.failed_steps = 0
        self.failed_requests = 0  # number of requests
        self.corrupt_rows = 0
        self.query_tokens = 0  # tokens looked up in the prefix cache
        self.hit_tokens = 0  # found there

    def count_preemption(self, seq: Sequence) -> None:
        """Count a preemption, and log a warning now and then."""
        self.preemptions += 1
        if self.preemptions % WARN_EVERY == 1:
            log.warning(
                "request %s was preempted (%s): the KV cache has too few blocks for what runs. "
                "This costs speed; raise gpu_memory_utilization, kv_cache_memory_bytes or "
                "num_gpu_blocks_override, or lower max_num_seqs or max_num_batched_tokens. "
                "Preemptions so far: %d",
                seq.request.id,
                "swap" if seq.state is SequenceState.SWAPPED else "recompute",
                self.preemptions,
            )

    def stats(
        self, kv: KVCache, registry: SequenceRegistry, unattributed_failures: int
    ) -> SchedulerStats:
        """Return the counters with the current state."""
        pool, host, kept = kv.pool, kv.host_pool, len(registry.waiting_for_resources)
        return SchedulerStats(
            running=len(registry.running),
            waiting=len(registry.waiting_queue)
            - registry.num_swapped
            + registry.num_followers
            + kept,
            swapped=registry.num_swapped,
            blocks=pool.size,
            held_blocks=pool.size - pool.available,
            cached_blocks=pool.cached,
            free_blocks=pool.available - pool.cached,
            host_blocks=host.size,
            free_host_blocks=host.available,
            preemptions=self.preemptions,
            prefix_query_tokens=self.query_tokens,
            prefix_hit_tokens=self.hit_tokens,
            following=registry.num_followers,
            waiting_for_resources=kept,
            failed_steps=self.failed_steps,
            unattributed_failures=unattributed_failures,
            failed_requests=self.failed_requests,
            corrupt_rows=self.corrupt_rows,
        )
