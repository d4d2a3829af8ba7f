"""Inline executor: runs one worker in this process.

With `threaded` the worker runs in a thread of its own, so that the scheduler plans step n + 1
while the kernels (which release the GIL) compute step n: a CPU needs that to overlap. Without it,
submit() launches the step, and a GPU computes while the scheduler plans.
A process forked from this one lacks that thread: it starts its own, and steps in flight fail there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quire.core.snapshot import LateWorkCounts
from quire.core.types import StepPlan, StepResult
from quire.errors import EngineError
from quire.executors.base import StepFuture
from quire.kernels.framework import late_work
from quire.runner.model_input import ModelInput, ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.runner.worker_calls import WorkerCalls


class _ThreadStepFuture:
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future
        self._pid = os.getpid()

    def wait(self) -> StepResult:
        if self._pid != os.getpid() and not self._future.done():
            raise EngineError(
                "the process was forked during the step, which its parent process runs"
            )
        error = (
            self._future.exception()
        )  # Ctrl-C in this wait is raised, and does not affect the step
        if error is not None and not isinstance(error, Exception):
            raise EngineError(f"the step was ended by {type(error).__name__}") from error
        return self._future.result()


class Executor:
    """Runs plans with one runner."""

    def __init__(self, inputs: ModelInputBuilder, runner: ModelRunner, *, threaded: bool) -> None:
        self.runner = runner
        self._inputs = inputs
        self._calls = WorkerCalls(runner)
        self._thread = _device_thread() if threaded else None
        self._pid = os.getpid()
        self._step_failed = False  # a step raised in the thread: later ones do not run

    def submit(self, plan: StepPlan) -> StepFuture:
        return self.launch(self._inputs.build(plan))

    def launch(self, step: ModelInput) -> StepFuture:
        """Run a step that was built elsewhere."""
        thread = self._own_thread()
        if thread is None:
            return self.runner.launch(step)
        return _ThreadStepFuture(thread.submit(self._run, step))

    def _run(self, step: ModelInput) -> StepResult:
        """In the thread. A step after one that raised would run on inconsistent state."""
        if self._step_failed:
            self.runner.skip(step)
            raise EngineError("the previous step failed")
        try:
            return self.runner.launch(step).wait()
        except BaseException:
            self._step_failed = True
            raise

    def call(self, name: str, *args: Any) -> list[Any]:
        return [self._run_between_steps(getattr(self._calls, name), *args)]

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [self._run_between_steps(function, self.runner.model)]

    def _run_between_steps(self, function: Callable[..., Any], *args: Any) -> Any:
        thread = self._own_thread()
        if thread is not None:
            return thread.submit(function, *args).result()
        self.runner.worker.synchronize()
        return function(*args)

    def late_work(self) -> LateWorkCounts:
        return late_work.counts()

    def release_kv_memory(self) -> None:
        self.runner.release_kv_memory()

    def recover(self) -> None:
        self._step_failed = False
        self.runner.recover()

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        """Do nothing: there is no other process that can end."""

    def shutdown(self) -> None:
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _own_thread(self) -> ThreadPoolExecutor | None:
        """Return the thread, started again in a forked process."""
        if self._thread is not None and self._pid != os.getpid():
            self._thread, self._pid = _device_thread(), os.getpid()
        return self._thread


def _device_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "quire-device")
