"""Max seqs limit: bounds the number of sequences in one step (max_num_seqs)."""

from __future__ import annotations

from quire.core.scheduling.limits.base import StepBudget
from quire.core.types import Sequence


class MaxSeqsLimit(StepBudget):
    """left = seats - rows taken in this step, never negative."""

    def __init__(self, seats: int) -> None:
        assert seats > 0, seats
        self.max_seqs = seats
        self.left = seats

    def begin_step(self, sequences: int) -> None:
        self.left = self.max_seqs

    def allow(self, seq: Sequence, want: int) -> int:
        return want if self.left else 0

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= 1

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += 1

    def full(self) -> bool:
        return self.left <= 0

    def free_decode_rows(self) -> int:
        return self.left

    def take_decode_rows(self, rows: int) -> None:
        self.left -= rows
