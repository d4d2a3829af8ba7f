"""Max seqs limit: bounds the number of sequences in one step (max_num_seqs)."""

from __future__ import annotations

from quire.core.scheduling.limits.base import StepBudget
from quire.core.types import Sequence


class MaxSeqsLimit(StepBudget):
    """left = max_seqs - rows taken in this step, never negative."""

    def __init__(self, max_seqs: int) -> None:
        assert max_seqs > 0, max_seqs
        self.max_seqs = max_seqs
        self.left = max_seqs

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
