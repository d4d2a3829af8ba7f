"""A step being planned: what the scheduler has decided so far.

Adding a row and removing it again are exact opposites, limits included.
"""

from __future__ import annotations

from quire.core.scheduling.limits.base import NO_BOUND, Limit
from quire.core.types import UNKNOWN, BlockCopy, Row, Sequence, SequenceState, StepPlan


class PlanBuilder:
    """rows: in order; a sequence has at most one."""

    def __init__(self, limits: list[Limit], sequences: int) -> None:
        self.rows: list[Row] = []
        self.joins: list[Sequence] = []
        self.changed_tables: list[Sequence] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.preempted: list[str] = []
        self.swapped: list[Sequence] = []  # among those, who went to the host
        self._limits = limits
        for limit in limits:
            limit.begin_step(sequences)

    def allowed_tokens(self, seq: Sequence) -> int:
        """How many tokens of the sequence the limits let through."""
        n = seq.pending
        for limit in self._limits:
            n = limit.allow(seq, n)
        return n

    def may_be_overtaken(self, seq: Sequence) -> bool:
        """Whether a limit refuses this sequence only, so that those behind it may go first."""
        n = seq.pending
        for limit in self._limits:
            n = limit.allow(seq, n)
            if not n:
                return limit.allows_overtaking
        return False

    @property
    def full(self) -> bool:
        """Whether no further row of any sequence fits."""
        return any(limit.full() for limit in self._limits)

    def free_decode_rows(self) -> int:
        """At least so many further rows of one token each no limit would refuse."""
        return min([limit.free_decode_rows() for limit in self._limits], default=NO_BOUND)

    def take_decode_rows(self, rows: int) -> None:
        """Count rows of one token that were added without asking, within slack()."""
        for limit in self._limits:
            limit.take_decode_rows(rows)

    def add(self, seq: Sequence, n: int) -> None:
        """Give the sequence a row of its next n tokens."""
        for limit in self._limits:
            limit.take(seq, n)
        start = seq.planned
        samples = n == seq.pending
        self.rows.append(Row(seq, start, n, samples))
        seq.planned = start + n
        if samples:
            seq.tokens.append(UNKNOWN)

    def remove(self, seq: Sequence) -> None:
        """Take back the sequence's row, if it has one."""
        for i, row in enumerate(self.rows):
            if row.seq is seq:
                del self.rows[i]
                seq.planned = row.start
                if row.samples:
                    seq.tokens.pop()
                for limit in self._limits:
                    limit.undo(seq, row.count)
                return

    def build(self, step: int, leaves: tuple[int, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            rows=tuple(self.rows),
            joins=tuple(self.joins),
            leaves=leaves,
            changed_tables=tuple(
                seq for seq in self.changed_tables if seq.state is SequenceState.RUNNING
            ),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
        )
