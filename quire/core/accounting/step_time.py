"""Step time: estimates from finished steps of the same cost what a step will take.

So a step of 8,192 tokens may take longer than one of one token.
"""

from __future__ import annotations

from operator import mul

from quire.core.types import StepPlan

TOKEN_BASE_COST = 1024
"""Tokens of context that cost as much in attention as the rest of a token's work. Low: small
models reach that early, and an estimate that is too long does less harm."""
DEFAULT_STEP_S = 60.0
"""The expected time of a step before any has finished."""
SLOWEST_DECAY = 0.98
"""The slowest time of a size decays by this factor with each further step of the size."""
_COST_BUCKETS = 64


def step_cost(plan: StepPlan) -> int:
    """The cost of a step, in tokens times the context that each attends to."""
    if not plan.rows:
        return 0
    _, starts, counts, *_ = zip(*plan.rows)
    tokens = sum(counts)
    looked_at = sum(starts) if tokens == len(counts) else sum(map(mul, counts, starts))
    return int(TOKEN_BASE_COST * tokens + looked_at + sum(map(mul, counts, counts)) // 2)


class StepTimeEstimate:
    """Expected time of a step of some cost: that of the slowest with the same power of two."""

    def __init__(self) -> None:
        self._slowest_ns = [0] * _COST_BUCKETS  # ns

    def update(self, work: int, ns: int) -> None:
        """A step of some cost finished."""
        size = work.bit_length()
        self._slowest_ns[size] = max(ns, int(self._slowest_ns[size] * SLOWEST_DECAY))

    def estimate_ns(self, work: int) -> int:
        """Returns ns. A cost above all seen ones takes proportionally longer."""
        size, slowest = work.bit_length(), self._slowest_ns
        if slowest[size]:
            return max(slowest[: size + 1])
        for smaller in range(size - 1, -1, -1):
            if slowest[smaller]:
                return max(slowest[: smaller + 1]) << (size - smaller)
        return max(slowest) or int(DEFAULT_STEP_S * 1e9)
