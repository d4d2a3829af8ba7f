"""Replay state: brings a scheduler into the state in which a recording begins.

Used only by replays. It moves sequences through the same methods as the scheduler.
"""

from __future__ import annotations

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.drafting import Drafting, RecordedDrafts
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import UNKNOWN, Row, StepPlan, Wants

RestoredRow = tuple[str, int, int, int]
"""Request, index of the sequence, count, drafts."""


class ReplayState:
    """State of one scheduler, between two of its steps."""

    def __init__(
        self,
        kv: KVCache,
        registry: SequenceRegistry,
        inflight: InflightSteps,
        drafting: Drafting,
    ) -> None:
        self._kv = kv
        self._registry = registry
        self._inflight = inflight
        self._drafting = drafting

    def set_drafts(self, drafts: RecordedDrafts) -> None:
        """Set the drafts of the next plan."""
        self._drafting.recorded = drafts

    def start_running(self, request_id: str, index: int, computed: int) -> None:
        """Start a waiting sequence, with `computed` tokens in the cache."""
        kv, seq = self._kv, self._registry.groups[request_id].sequences[index]
        self._registry.remove_waiting(seq)
        self._registry.start_running(seq)
        if kv.allocate(seq, computed):
            seq.computed = seq.planned = computed
            kv.cache_full_blocks(seq, 0)

    def fork_followers(self) -> None:
        """Queue the other sequences of requests whose prompt is computed."""
        for seq in [*self._registry.running]:
            self._registry.fork_followers(seq)

    def restore_step(self, rows: list[RestoredRow], proposals: int, continued: int) -> StepPlan:
        """Return a step that is in flight, of running sequences that have blocks for it.

        proposals: drafts that a model makes behind it. continued: so many of the first rows
        continue others.
        """
        made = []
        for request_id, index, count, drafts in rows:
            seq = self._registry.groups[request_id].sequences[index]
            if not self._kv.allocate(seq, count):
                continue
            start, wants = seq.planned, Wants.NOTHING
            if count - drafts == seq.pending:
                wants = Wants.TOKEN if seq.request.pooling is None else Wants.POOLED
            seq.planned, seq.row_drafts = start + count - drafts, drafts
            made.append(Row(seq, start, count, wants, drafts))
            if wants is Wants.TOKEN:
                seq.tokens.append(UNKNOWN)
        plan = StepPlan(
            self._inflight.next_step,
            tuple(made),
            num_drafts=sum(row.drafts for row in made),
            proposals=proposals,
            continues=tuple(range(continued)),
        )
        self._inflight.push(plan)
        return plan

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
