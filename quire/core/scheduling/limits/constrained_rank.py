"""Constrained rank limit: runs sequences with a constraint on the data-parallel rank with grammars.

That is rank 0, which is in the engine's process, as compiled grammars are.
"""

from __future__ import annotations

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import Sequence


class ConstrainedRankLimit(StepBudget):
    """Refuses such sequences on other ranks."""

    allows_overtaking = True

    def allow(self, seq: Sequence, want: int) -> int:
        return 0 if seq.dp_rank and seq.request.constraint is not None else want

    def free_decode_rows(self) -> int:
        return NO_BOUND
