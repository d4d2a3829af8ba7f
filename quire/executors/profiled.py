"""Profiled executor: records a trace of some of the steps that it passes to another executor."""

from __future__ import annotations

from quire.core.types import StepPlan
from quire.executors.base import Executor as Inner
from quire.executors.base import StepFuture
from quire.executors.forwarding import ForwardingExecutor
from quire.runner.profiler import StepProfiler


class Executor(ForwardingExecutor):
    """Counts the steps of a trace."""

    def __init__(self, inner: Inner, trace: StepProfiler) -> None:
        super().__init__(inner)
        self._trace = trace

    def submit(self, plan: StepPlan) -> StepFuture:
        self._trace.before_step()
        return super().submit(plan)

    def shutdown(self) -> None:
        self._trace.stop()
        super().shutdown()
