"""Steps in flight: keeps plans whose results have not been applied yet, oldest first.

When a sequence stops running while rows of it are in flight, those rows become stale: their
results are dropped. Deferred frees of the KV cache are the only other state of steps in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quire.core.types import Sequence, StepPlan


@dataclass(slots=True)
class InflightStep:
    """stale: sequences whose rows are ignored."""

    plan: StepPlan
    stale: set[Sequence] = field(default_factory=set)


class InflightSteps:
    """At most `depth` at a time; results are applied in the order of submission."""

    def __init__(self, depth: int) -> None:
        assert depth > 0, depth
        self._depth = depth
        self._steps: deque[InflightStep] = deque()
        self.last_step = 0  # number of the last planned step

    @property
    def next_step(self) -> int:
        """The number of the step being planned. Asserts that one may be planned."""
        assert len(self._steps) < self._depth, f"{len(self._steps)} steps are in flight already"
        return self.last_step + 1

    @property
    def has_rows(self) -> bool:
        """Whether a result will change anything."""
        return any(step.plan.rows for step in self._steps)

    @property
    def only_step(self) -> InflightStep | None:
        """The step in flight; None: there is none, or more than one."""
        return self._steps[0] if len(self._steps) == 1 else None

    def push(self, plan: StepPlan) -> None:
        self.last_step = plan.step
        self._steps.append(InflightStep(plan))

    def pop_oldest(self, plan: StepPlan) -> InflightStep:
        assert self._steps, f"step {plan.step} was applied already"
        step = self._steps.popleft()
        assert step.plan.step == plan.step, f"step {plan.step} before {step.plan.step}"
        return step

    def invalidate_rows(self, seq: Sequence) -> None:
        """Ignore the rows in flight of this sequence."""
        for step in self._steps:
            step.stale.add(seq)
