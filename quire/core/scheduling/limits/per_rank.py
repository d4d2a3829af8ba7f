"""Per-rank budget: gives each data-parallel rank its own share of a step.

A step of several ranks is as long as that of the rank with most to do, so a budget of tokens or
rows is one of a rank. A sequence has its rank before a budget is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.core.scheduling.limits.base import StepBudget
from quire.core.types import Row, Sequence


def per_rank(of: Seq[Seq[StepBudget]]) -> list[StepBudget]:
    """Return budgets from those of each rank, in their order. One that all ranks have is not one of
    a rank."""
    return [one[0] if one[0] is one[-1] else PerRankBudget(one) for one in zip(*of, strict=True)]


class PerRankBudget(StepBudget):
    """of: the budget of each rank, all of one class."""

    def __init__(self, of: Seq[StepBudget]) -> None:
        self._of = of
        self.allows_overtaking = of[0].allows_overtaking

    def begin_step(self, sequences: int) -> None:
        for one in self._of:
            one.begin_step(sequences)

    def allow(self, seq: Sequence, want: int) -> int:
        return self._of[seq.dp_rank].allow(seq, want)

    def take(self, seq: Sequence, n: int) -> None:
        self._of[seq.dp_rank].take(seq, n)

    def undo(self, seq: Sequence, n: int) -> None:
        self._of[seq.dp_rank].undo(seq, n)

    def full(self) -> bool:
        return all(one.full() for one in self._of)

    def free_decode_rows(self) -> int:
        """As if all rows were those of the rank with least left."""
        return min(one.free_decode_rows() for one in self._of)

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        by_rank: dict[int, list[Row]] = {}
        for row in rows:
            by_rank.setdefault(row.seq.dp_rank, []).append(row)
        for rank, own in by_rank.items():
            self._of[rank].take_decode_rows(len(own))
            self._of[rank].take_each_decode_row(own)
