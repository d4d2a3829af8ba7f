"""Forwarding executor: passes everything to another executor. Base of those that add something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan
from quire.executors.base import Executor, StepFuture


class ForwardingExecutor:
    """Passes everything to `inner`."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner

    def submit(self, plan: StepPlan) -> StepFuture:
        return self.inner.submit(plan)

    def call(self, name: str, *args: Any) -> list[Any]:
        return self.inner.call(name, *args)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return self.inner.apply_model(function)

    def late_work(self) -> LateWorkCounts:
        return self.inner.late_work()

    def release_kv_memory(self) -> None:
        self.inner.release_kv_memory()

    def recover(self) -> None:
        self.inner.recover()

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        self.inner.set_failure_callback(callback)

    def shutdown(self) -> None:
        self.inner.shutdown()
