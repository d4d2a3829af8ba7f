"""Profiled executor: records a trace of some of the steps that it passes to another executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan
from quire.executors.base import Executor as Inner
from quire.executors.base import StepFuture
from quire.runner.profiler import StepProfiler


class Executor:
    """Passes everything to another executor."""

    def __init__(self, inner: Inner, trace: StepProfiler) -> None:
        self.inner = inner
        self._trace = trace

    def submit(self, plan: StepPlan) -> StepFuture:
        self._trace.before_step()
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
        self._trace.stop()
        self.inner.shutdown()
