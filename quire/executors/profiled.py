"""An executor that records a trace of some of the steps it passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.core.types import StepPlan
from quire.executors.base import Executor as Inner
from quire.executors.base import Pending
from quire.runner.profile import Trace


class Executor:
    """Passes everything on to another."""

    def __init__(self, inner: Inner, trace: Trace) -> None:
        self.inner = inner
        self._trace = trace

    def submit(self, plan: StepPlan) -> Pending:
        self._trace.step()
        return self.inner.submit(plan)

    def call(self, function: Callable[[Any], Any]) -> list[Any]:
        return self.inner.call(function)

    def forget_kv(self) -> None:
        self.inner.forget_kv()

    def mend(self) -> None:
        self.inner.mend()

    def shutdown(self) -> None:
        self._trace.stop()
        self.inner.shutdown()
