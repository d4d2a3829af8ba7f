"""Tenant KV quota: starts no waiting sequence of a tenant that holds its share of the KV cache.

Running sequences may grow beyond the share; when memory runs out the order preempts the largest
holder. A tenant that holds nothing may always run one sequence. The quota also has the fair queue
charge its service at the start of a step, and pass over tenants that are at their share.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.scheduling.order.fair import FairQueue
from quire.core.types import NO_BLOCK, Request, Sequence, SequenceState

SEQUENCES_PER_CHARGE = 64
"""If any wait, service is charged every step up to this many sequences; with more, less often."""
IDLE_CHARGE_EVERY = 16
"""Steps between two charges if no sequence waits."""


class TenantKVQuota(StepBudget):
    """blocks: in the cache. most_blocks: maximum that a sequence of a request needs at a length."""

    allows_overtaking = True

    def __init__(
        self, order: FairQueue, blocks: int, most_blocks: Callable[[Request, int], int]
    ) -> None:
        self._queue = order
        self._blocks = blocks
        self._max_blocks = most_blocks
        self._running: dict[Sequence, None] = {}  # of tenants with a quota
        self._held_blocks: dict[bytes, int] = {}
        self._steps = 0
        self._added_this_step: dict[
            Sequence, int
        ] = {}  # started in this step -> blocks counted for it

    def begin_step(self, sequences: int) -> None:
        self._steps += 1
        interval = (
            1 + self._queue.num_accounts // SEQUENCES_PER_CHARGE
            if len(self._queue)
            else IDLE_CHARGE_EVERY
        )
        if self._steps % interval == 0:
            self._queue.charge_service()
        self._added_this_step = {}
        if self._running:
            self._recount()
            self._queue.deprioritize(
                {name for name in self._held_blocks if self._is_at_quota(name)}
            )

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.state is SequenceState.RUNNING or seq.request.tenant_limits.kv_share is None:
            return want
        return want if self._fits(seq) else 0

    def take(self, seq: Sequence, n: int) -> None:
        if seq.request.tenant_limits.kv_share is not None and seq not in self._running:
            self._running[seq] = None
            self._added_this_step[seq] = self._max_blocks(seq.request, len(seq.tokens))
            self._charge(seq, self._added_this_step[seq])

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._added_this_step:
            del self._running[seq]
            self._charge(seq, -self._added_this_step.pop(seq))

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def _recount(self) -> None:
        self._running = {seq: None for seq in self._running if seq.state is SequenceState.RUNNING}
        self._held_blocks = {}
        for seq in self._running:
            held = sum(len(table) - table.count(NO_BLOCK) for table in seq.tables)
            self._charge(seq, held + sum(map(len, seq.cross_tables)))

    def _charge(self, seq: Sequence, blocks: int) -> None:
        name = seq.request.tenant
        self._held_blocks[name] = self._held_blocks.get(name, 0) + blocks

    def _is_at_quota(self, tenant: bytes) -> bool:
        first = self._queue.next_of_tenant(tenant)
        return first is not None and not self._fits(first)

    def _fits(self, seq: Sequence) -> bool:
        held = self._held_blocks.get(seq.request.tenant, 0)
        share = seq.request.tenant_limits.kv_share
        if not held or share is None:
            return True
        return held + self._max_blocks(seq.request, len(seq.tokens)) <= share * self._blocks
