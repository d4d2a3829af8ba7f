"""Scheduler counters: count preemptions, prefix hits and failures since the start."""

from __future__ import annotations

import logging

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduler_stats import SchedulerStats
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import Sequence

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
        "tier_hit_tokens",
        "tier_query_tokens",
    )

    def __init__(self) -> None:
        self.preemptions = 0
        self.failed_steps = 0
        self.failed_requests = 0  # number of requests
        self.corrupt_rows = 0
        self.query_tokens = 0  # tokens looked up in the prefix cache
        self.hit_tokens = 0  # found on the device
        self.tier_query_tokens = 0  # the others, if there are tiers
        self.tier_hit_tokens = 0  # loaded from a tier

    def count_lookup(self, seq: Sequence, *, tiers: bool) -> None:
        """Count the prefix that a sequence found at its first admission."""
        on_device = seq.cached - seq.loaded
        self.query_tokens += len(seq.tokens)
        self.hit_tokens += on_device
        if tiers:
            self.tier_query_tokens += len(seq.tokens) - on_device
            self.tier_hit_tokens += seq.loaded

    def count_preemption(self, seq: Sequence) -> None:
        """Count a preemption, and log a warning now and then."""
        self.preemptions += 1
        if self.preemptions % WARN_EVERY == 1:
            log.warning(
                "request %s was preempted: the KV cache has too few blocks for what runs. "
                "This costs speed; raise gpu_memory_utilization, kv_cache_memory_bytes or "
                "num_gpu_blocks_override, or lower max_num_seqs or max_num_batched_tokens. "
                "Preemptions so far: %d",
                seq.request.id,
                self.preemptions,
            )

    def stats(
        self, kv: KVCache, registry: SequenceRegistry, unattributed_failures: int
    ) -> SchedulerStats:
        """Return the counters with the current state."""
        pool, host, in_resource_wait = kv.pool, kv.host, len(registry.waiting_for_resources)
        return SchedulerStats(
            running=len(registry.running),
            waiting=len(registry.waiting_queue) + registry.num_followers + in_resource_wait,
            blocks=pool.size,
            held_blocks=pool.size - pool.available,
            cached_blocks=pool.cached,
            free_blocks=pool.available - pool.cached,
            preemptions=self.preemptions,
            prefix_query_tokens=self.query_tokens,
            prefix_hit_tokens=self.hit_tokens,
            tier_query_tokens=self.tier_query_tokens,
            tier_hit_tokens=self.tier_hit_tokens,
            host_blocks=host.pool.size if host else 0,
            held_host_blocks=host.pool.size - host.pool.available if host else 0,
            cached_host_blocks=host.pool.cached if host else 0,
            host_stored_blocks=host.stored_blocks if host else 0,
            host_loaded_blocks=host.loaded_blocks if host else 0,
            following=registry.num_followers,
            waiting_for_resources=in_resource_wait,
            failed_steps=self.failed_steps,
            unattributed_failures=unattributed_failures,
            failed_requests=self.failed_requests,
            corrupt_rows=self.corrupt_rows,
        )
