"""Continued steps: plans a step behind one whose drafts are not verified yet.

A row with drafts yields an unknown number of tokens. The worker has that number, the last token and
what a model drafted behind it, so a step of the same sequences can be enqueued at once: each of its
rows starts where the row before ends. They have blocks for the furthest such place. What does not
depend on the step in flight has its rows behind those: prompts, sequences that start. Tokens that
the host must know wait for the result.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.kv.kv_cache import KVCache
from quire.core.scheduling.drafting import Drafting
from quire.core.scheduling.inflight_steps import InflightSteps
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.sequence_registry import SequenceRegistry
from quire.core.types import Row, Sequence, SequenceState, StepPlan, Wants


class ContinuedSteps:
    """Helper of the scheduler, of one data-parallel rank."""

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

    @property
    def rows(self) -> dict[int, Row]:
        """Rows of the only step in flight that the next one can continue, by their places in it;
        {}: it cannot, and a plan needs the result."""
        step = self._inflight.only_step
        if step is None or not self._drafting.may_continue(step.plan):
            return {}
        live, stale, token = SequenceState.RUNNING, step.stale, Wants.TOKEN
        rows = {
            i: row
            for i, row in enumerate(step.plan.rows)
            if row.wants is token and row.seq.state is live and row.seq not in stale
        }
        return rows if all(map(_can_follow, rows.values())) else {}

    def plan_rows(self, draft: PlanBuilder) -> dict[Sequence, int]:
        """Give each of these sequences its row, the first of the plan, unless its last token is in
        flight. Returns the places of the rows before; {}: there is no row, because one of them
        would have none."""
        step, found = self._inflight.only_step, self.rows
        if step is None or not found:
            return {}
        found = {i: row for i, row in found.items() if len(row.seq.tokens) < row.seq.max_len}
        kv, rows, most = self._kv, found.values(), step.plan.proposals
        room = [min(row.drafts + 1 + 2 * most, row.seq.max_len - row.seq.planned) for row in rows]
        needed = sum([kv.blocks_to_allocate(row.seq, n) for row, n in zip(rows, room)])
        candidates = draft.candidates([row.seq for row in rows])
        if needed > kv.pool.available or len(candidates) < len(rows):
            return {}
        if draft.free_decode_rows() < len(rows):
            return {}
        for row, n in zip(rows, room):
            seq = row.seq
            more = kv.blocks_to_allocate(seq, n)
            if more and kv.free_out_of_window(seq, self._inflight.last_step):
                draft.changed_tables.append(seq)
            kv.allocate(seq, n)  # also for what the model drafts behind the row
            drafts = self._drafting.choose_continued(seq, row.drafts, most)
            draft.add(seq, draft.allowed_tokens(seq, drafts))
        return {row.seq: i for i, row in found.items()}


def _can_follow(row: Row) -> bool:
    """Whether a row can be planned behind this one before its result is there. If the sequence has
    ended by then, its row is computed in vain."""
    request = row.seq.request
    return request.constraint is None and request.thinking is None


def placed_rows(plan: StepPlan) -> Seq[Row]:
    """Return the rows of the oldest step in flight, with their true starts."""
    if not plan.continues:
        return plan.rows
    count = len(plan.continues)
    placed = [row._replace(start=row.seq.computed) for row in plan.rows[:count]]
    return [*placed, *plan.rows[count:]]
