"""Scheduler counters: count preemptions, prefix hits and failures since the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from quire.core.kv.block_pool import BlockPool
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
        self, kvs: Seq[KVCache], registry: SequenceRegistry, unattributed_failures: int
    ) -> SchedulerStats:
        """Return the counters with the current state. kvs: of each data-parallel rank."""
        in_resource_wait = len(registry.waiting_for_resources)
        hosts = [kv.host for kv in kvs if kv.host is not None]
        blocks, available, cached = _count([kv.pool for kv in kvs])
        host_blocks, host_available, host_cached = _count([host.pool for host in hosts])
        return SchedulerStats(
            running=len(registry.running),
            waiting=len(registry.waiting_queue) + registry.num_followers + in_resource_wait,
            blocks=blocks,
            held_blocks=blocks - available,
            cached_blocks=cached,
            free_blocks=available - cached,
            preemptions=self.preemptions,
            prefix_query_tokens=self.query_tokens,
            prefix_hit_tokens=self.hit_tokens,
            tier_query_tokens=self.tier_query_tokens,
            tier_hit_tokens=self.tier_hit_tokens,
            host_blocks=host_blocks,
            held_host_blocks=host_blocks - host_available,
            cached_host_blocks=host_cached,
            host_stored_blocks=sum([host.stored_blocks for host in hosts]),
            host_loaded_blocks=sum([host.loaded_blocks for host in hosts]),
            following=registry.num_followers,
            waiting_for_resources=in_resource_wait,
            failed_steps=self.failed_steps,
            unattributed_failures=unattributed_failures,
            failed_requests=self.failed_requests,
            corrupt_rows=self.corrupt_rows,
        )


def _count(pools: Seq[BlockPool]) -> tuple[int, int, int]:
    """Return the blocks of some pools: all, available ones, and the cached ones of those."""
    sizes = [(pool.size, pool.available, pool.cached) for pool in pools]
    size, available, cached = map(sum, zip(*sizes)) if sizes else (0, 0, 0)
    return size, available, cached
