"""Plan builder: collects the rows of the step that is being planned.

Adding a row and removing it again are exact opposites, budgets included. With several data-parallel
ranks each gets a plan of its own, with its rows, slots and blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from quire.core.kv.tiers.host import NO_COPIES, TierCopies
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import (
    UNKNOWN,
    BlockCopy,
    DataParallelTokens,
    RankRows,
    Row,
    Sequence,
    SequenceState,
    StepPlan,
    Wants,
)


class StepBudgets:
    """The budgets of a scheduler, and which of them have each method that is called per row."""

    def __init__(self, budgets: Seq[StepBudget]) -> None:
        self.all = tuple(budgets)
        self.allowing = [one for one in budgets if type(one).allow is not StepBudget.allow]
        self.starting = [one for one in budgets if type(one).may_start is not StepBudget.may_start]
        self.taking = [one for one in budgets if type(one).take is not StepBudget.take]
        self.filling = [one for one in budgets if type(one).full is not StepBudget.full]
        self.taking_each = [
            one
            for one in budgets
            if type(one).take_each_decode_row is not StepBudget.take_each_decode_row
        ]
        self.sending = [one for one in budgets if type(one).plan_part is not StepBudget.plan_part]
        self.postponing = [
            one for one in budgets if type(one).postponed is not StepBudget.postponed
        ]


class PlanBuilder:
    """rows: in order; a sequence has at most one. copies: of each rank."""

    def __init__(self, budgets: StepBudgets, sequences: int, *, ranks: int = 1) -> None:
        self.rows: list[Row] = []
        self.joins: list[Sequence] = []
        self.changed_tables: list[Sequence] = []
        self.copies: list[list[BlockCopy]] = [[] for _ in range(ranks)]
        self.preempted: list[str] = []
        self.short_ranks: set[int] = set()  # where a sequence was preempted: none starts there
        self.num_drafts = 0
        self._budgets = budgets
        for budget in budgets.all:
            budget.begin_step(sequences)

    def allowed_tokens(self, seq: Sequence, drafts: int = 0, most: int = NO_BOUND) -> int:
        """Return how many of its pending tokens and following drafts the limits allow. most: for
        which it has blocks."""
        n = min(seq.pending + drafts, most)
        for budget in self._budgets.allowing:
            n = budget.allow(seq, n)
        return n

    def may_start(self, seq: Sequence) -> bool:
        """Whether no limit is known to refuse a sequence that has no blocks yet."""
        return all(budget.may_start(seq) for budget in self._budgets.starting)

    def may_be_overtaken(self, seq: Sequence) -> bool:
        """Whether a limit refuses this sequence only, so that those behind it may go first."""
        for budget in self._budgets.starting:
            if not budget.may_start(seq):
                return budget.allows_overtaking
        n = seq.pending
        for budget in self._budgets.allowing:
            n = budget.allow(seq, n)
            if not n:
                return budget.allows_overtaking
        return False

    def candidates(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the running sequences that may have a row, in their order."""
        for budget in self._budgets.postponing:
            postponed = budget.postponed()
            running = [seq for seq in running if seq not in postponed]
        return list(running)

    @property
    def full(self) -> bool:
        """Whether no further row of any sequence fits."""
        for budget in self._budgets.filling:  # noqa: SIM110 half the time of any()
            if budget.full():
                return True
        return False

    @property
    def samples(self) -> bool:
        """Whether the step yields tokens."""
        return any(row.wants is Wants.TOKEN for row in self.rows)

    def free_decode_rows(self) -> int:
        """Return a number of rows of one token each that no limit would refuse."""
        return min([budget.free_decode_rows() for budget in self._budgets.all], default=NO_BOUND)

    def take_decode_rows(self, rows: int) -> None:
        """Count rows of one token that were added without allow(), within free_decode_rows()."""
        if not rows:
            return
        for budget in self._budgets.all:
            budget.take_decode_rows(rows)
        for budget in self._budgets.taking_each:
            budget.take_each_decode_row(self.rows[-rows:])

    def add(self, seq: Sequence, n: int) -> None:
        """Add a row with the next n tokens of the sequence: pending ones, then drafts."""
        for budget in self._budgets.taking:
            budget.take(seq, n)
        start, pending = seq.planned, seq.pending
        drafts = n - pending if n > pending else 0
        seq.drafts, seq.row_drafts = seq.drafts[:drafts], drafts
        wants = Wants.NOTHING
        if n >= pending:
            wants = Wants.TOKEN if seq.request.pooling is None else Wants.POOLED
        self.rows.append(Row(seq, start, n, wants, drafts))
        seq.planned = start + n - drafts
        self.num_drafts += drafts
        if wants is Wants.TOKEN:
            seq.tokens.append(UNKNOWN)

    def remove(self, seq: Sequence) -> None:
        """Remove the sequence's row, if it has one."""
        for i, row in enumerate(self.rows):
            if row.seq is seq:
                del self.rows[i]
                seq.planned = row.start
                seq.row_drafts = 0
                self.num_drafts -= row.drafts
                if row.wants is Wants.TOKEN:
                    seq.tokens.pop()
                for budget in self._budgets.all:
                    budget.undo(seq, row.count)
                return

    def build(
        self,
        step: int,
        moves: Seq[RankMoves],
        proposals: int = 0,
        places: Mapping[Sequence, int] | None = None,
    ) -> StepPlan:
        """moves: of each rank. proposals: see StepPlan. places: of rows in the step before, by the
        sequences of the first rows that were added (StepPlan.continues)."""
        # workers read no parts of a step without rows: what these would carry stays to be sent
        sent = [one.plan_part() for one in self._budgets.sending] if self.rows else []
        plan = StepPlan(
            step=step,
            rows=tuple(self.rows),
            joins=tuple(self.joins),
            leaves=moves[0].leaves,
            changed_tables=tuple(
                seq for seq in self.changed_tables if seq.state is SequenceState.RUNNING
            ),
            swap_out=moves[0].tier.stores,
            swap_in=moves[0].tier.loads,
            copies=tuple(self.copies[0]),
            preempted=tuple(self.preempted),
            num_drafts=self.num_drafts,
            proposals=proposals,
            continues=tuple([places[row.seq] for row in self.rows if row.seq in places])
            if places
            else (),
            parts=tuple([part for part in sent if part is not None]),
        )
        return plan if len(moves) == 1 else divide_plan(plan, moves, self.copies)


class RankMoves(NamedTuple):
    """Slots that were emptied on a rank, and copies between its device and the host."""

    leaves: tuple[int, ...]
    tier: TierCopies = NO_COPIES


def divide_plan(
    plan: StepPlan, moves: Seq[RankMoves], copies: Seq[Seq[BlockCopy]] = ()
) -> StepPlan:
    """Return the plan of several ranks, with what each does.

    plan: has the sequences of all ranks. copies: within the device, of each rank; (): none.
    """
    rows_of: list[list[Row]] = [[] for _ in moves]
    for row in plan.rows:
        rows_of[row.seq.dp_rank].append(row)
    parts = plan.parts
    if plan.rows:
        counts = tuple([sum([row.count for row in rows]) for rows in rows_of])
        decodes = all(row.count == 1 and row.wants is Wants.TOKEN for row in plan.rows)
        ones = [sum([row.count == 1 for row in rows]) for rows in rows_of]
        of_ranks = [RankRows(one, len(rows) - one) for one, rows in zip(ones, rows_of, strict=True)]
        parts = (
            *parts,
            DataParallelTokens(counts, decodes, () if plan.num_drafts else tuple(of_ranks)),
        )
    plans = tuple(
        StepPlan(
            plan.step,
            tuple(rows),
            joins=tuple([seq for seq in plan.joins if seq.dp_rank == rank]),
            leaves=moved.leaves,
            changed_tables=tuple([seq for seq in plan.changed_tables if seq.dp_rank == rank]),
            swap_out=moved.tier.stores,
            swap_in=moved.tier.loads,
            copies=tuple(copies[rank]) if copies else (),
            proposals=plan.proposals,
            parts=parts,
        )
        for rank, (rows, moved) in enumerate(zip(rows_of, moves, strict=True))
    )
    return replace(
        plan,
        rows=tuple(chain.from_iterable(one.rows for one in plans)),
        leaves=tuple(chain.from_iterable(one.leaves for one in plans)),
        swap_out=tuple(chain.from_iterable(one.swap_out for one in plans)),
        swap_in=tuple(chain.from_iterable(one.swap_in for one in plans)),
        copies=tuple(chain.from_iterable(one.copies for one in plans)),
        dp_plans=plans,
    )
