"""A step being planned: what the scheduler has decided so far.

Adding a row and removing it again are exact opposites, limits included.
"""

from __future__ import annotations

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.types import UNKNOWN, Copy, Row, Sequence, State, StepPlan


class Draft:
    """rows: in order; a sequence has at most one."""

    def __init__(self, limits: list[Limit], sequences: int) -> None:
        self.rows: list[Row] = []
        self.joins: list[Sequence] = []
        self.moved: list[Sequence] = []
        self.swap_out: list[Copy] = []
        self.swap_in: list[Copy] = []
        self.copies: list[Copy] = []
        self.preempted: list[str] = []
        self.swapped: list[Sequence] = []  # among those, who went to the host
        self._limits = limits
        for limit in limits:
            limit.begin(sequences)

    def allowance(self, seq: Sequence) -> int:
        """How many tokens of the sequence the limits let through."""
        n = seq.pending
        for limit in self._limits:
            n = limit.allow(seq, n)
        return n

    def passed_over(self, seq: Sequence) -> bool:
        """Whether a limit refuses this sequence only, so that those behind it may go first."""
        n = seq.pending
        for limit in self._limits:
            n = limit.allow(seq, n)
            if not n:
                return limit.passing
        return False

    @property
    def full(self) -> bool:
        """Whether no further row of any sequence fits."""
        return any(limit.full() for limit in self._limits)

    def slack(self) -> int:
        """At least so many further rows of one token each no limit would refuse."""
        return min([limit.slack() for limit in self._limits], default=NO_BOUND)

    def take_ones(self, rows: int) -> None:
        """Count rows of one token that were added without asking, within slack()."""
        for limit in self._limits:
            limit.take_ones(rows)

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

    def freeze(self, step: int, leaves: tuple[int, ...]) -> StepPlan:
        return StepPlan(
            step=step,
            rows=tuple(self.rows),
            joins=tuple(self.joins),
            leaves=leaves,
            moved=tuple(seq for seq in self.moved if seq.state is State.RUNNING),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            preempted=tuple(self.preempted),
        )
