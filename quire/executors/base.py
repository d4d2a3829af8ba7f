"""How a plan reaches the device, wherever the device is.

Plans are submitted and waited for in the same order. `submit` returns at once when the executor can
work while the scheduler plans (steps in flight); it has copied by then all it needs of the plan's
live objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.core.types import StepPlan, StepResult


class StepFuture(Protocol):
    """A step under way."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the step raised."""
        ...


class Executor(Protocol):
    """One or more devices that obey plans."""

    def submit(self, plan: StepPlan) -> StepFuture: ...

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run `function(model)` on every rank, between steps; one result per rank."""
        ...

    def release_kv_memory(self) -> None:
        """Give the KV memory back. Between steps, while no block is in use or cached."""
        ...

    def recover(self) -> None:
        """A step raised, and all that were submitted have been waited for: be ready for more.

        Slots are joined anew from here on. Raises EngineDead if the device is lost: a process that
        goes on with it would fail every step.
        """
        ...

    def shutdown(self) -> None: ...
