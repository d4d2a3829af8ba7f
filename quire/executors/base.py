"""Contract of an executor: sends steps to the workers of one or more ranks.

Plans are submitted and waited for in the same order. `submit` returns at once when the workers can
run while the scheduler plans (steps in flight); by then it has copied all that it needs of the
plan's live objects. What is not a step goes through `call`: no caller reaches a worker directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan, StepResult


class StepFuture(Protocol):
    """A step in flight."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises what the step raised."""
        ...


class Executor(Protocol):
    """One or more ranks that run plans."""

    def submit(self, plan: StepPlan) -> StepFuture: ...

    def call(self, name: str, *args: Any) -> list[Any]:
        """Run a method of quire.runner.worker_calls.WorkerCalls on every rank, between steps.

        Returns one result per rank, in rank order.
        """
        ...

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Run `function(model)` on every rank, between steps; one result per rank.

        Raises Unsupported where ranks are other processes: functions cannot be sent there.
        """
        ...

    def late_work(self) -> LateWorkCounts:
        """Return the sum of what ranks compiled and captured after they were ready.

        The seconds are those that steps waited: of ranks that compile side by side, the longest.
        The same object until there is more.
        """
        ...

    def release_kv_memory(self) -> None:
        """Return the KV memory to the system. Between steps, while no block is in use or cached."""
        ...

    def recover(self) -> None:
        """Prepare for more steps after one raised and all submitted ones were waited for.

        Slots are joined again afterwards. Raises EngineDead if a device is lost: each later step in
        this process would fail.
        """
        ...

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        """Call callback(), a method, from any thread when a rank fails: recover() raises then."""
        ...

    def shutdown(self) -> None: ...
