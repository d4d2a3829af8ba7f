"""Plans whose results are not in yet, oldest first.

A sequence that stops running while rows of it are in flight makes those rows dead: whatever they
say is dropped. This and the fence of the KV cache are all there is to steps in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quire.core.types import Sequence, StepPlan


@dataclass(slots=True)
class Flight:
    """swapped: whom this plan moves to the host. dead: whose rows mean nothing any more."""

    plan: StepPlan
    swapped: list[Sequence]
    dead: set[Sequence] = field(default_factory=set)


class Flights:
    """At most `depth` at a time; they land in the order they were launched."""

    def __init__(self, depth: int) -> None:
        assert depth > 0, depth
        self._depth = depth
        self._flying: deque[Flight] = deque()
        self.step = 0  # the last one planned

    @property
    def next_step(self) -> int:
        """The number of the step being planned. Asserts that one may be planned."""
        assert len(self._flying) < self._depth, f"{len(self._flying)} steps are in flight already"
        return self.step + 1

    @property
    def have_rows(self) -> bool:
        """Whether a result will change anything."""
        return any(flight.plan.rows for flight in self._flying)

    def launch(self, plan: StepPlan, swapped: list[Sequence]) -> None:
        self.step = plan.step
        self._flying.append(Flight(plan, swapped))

    def land(self, plan: StepPlan) -> Flight:
        assert self._flying, f"step {plan.step} was applied already"
        flight = self._flying.popleft()
        assert flight.plan.step == plan.step, f"step {plan.step} before {flight.plan.step}"
        return flight

    def kill(self, seq: Sequence) -> None:
        """Rows of this sequence in flight mean nothing any more."""
        for flight in self._flying:
            flight.dead.add(seq)
