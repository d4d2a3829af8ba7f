"""Step observers: called with each call that an engine makes of its scheduler, in order, on its
thread.

The heartbeat (quire.engine.heartbeat_page) and the flight recorder
(quire.engine.recording.flight_recorder) are two. An observer changes nothing, and must be fast: it
is called in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from quire.core.types import Request, StepPlan, Update
from quire.core.types import Sequence as Seq

log = logging.getLogger(__name__)


class StepObserver:
    """Base of observers: does nothing on any event."""

    def on_request_added(self, request: Request, seq: Seq, *, kept: bool) -> None:
        """The scheduler accepted a request. seq: its first sequence. kept: it waits for a resource
        before it is queued."""

    def on_admission_change(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        """Requests that waited for a resource: now queued, or ended."""

    def on_request_abort(self, request_id: str) -> None:
        """A request is about to be aborted."""

    def on_sequence_abort(self, request_id: str, index: int) -> None:
        """A sequence is about to be ended by a stop string."""

    def on_request_release(self, request_id: str) -> None:
        """The blocks of a held request are about to be released."""

    def on_prefix_cache_reset(self) -> None:
        """The prefix cache was emptied."""

    def on_memory_release(self) -> None:
        """What is on the device beside weights and KV was given up."""

    def on_step_planned(self, plan: StepPlan) -> None:
        """A plan was made; it is submitted next."""

    def on_step_submitted(self, plan: StepPlan) -> None:
        """The executor was given the plan."""

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        """The oldest plan was applied. The figures are those of Scheduler.observe_step()."""

    def on_step_failed(self, plan: StepPlan) -> None:
        """The oldest plan raised; the scheduler has failed it."""

    def on_request_failed(self, request_id: str, message: str) -> None:
        """A request is about to be ended, because steps fail with it alone."""


class CompositeStepObserver(StepObserver):
    """Calls several observers in order. One that raises is removed: it must not harm the engine."""

    def __init__(self, all_of_them: Iterable[StepObserver]) -> None:
        self._observers = tuple(all_of_them)

    def _notify(self, call: Callable[[StepObserver], None]) -> None:
        for one in self._observers:
            try:
                call(one)
            except Exception:  # noqa: BLE001 - a border, it is logged
                self._remove(one)

    def _remove(self, observer: StepObserver) -> None:
        log.exception("%s is switched off: it failed", type(observer).__name__)
        self._observers = tuple(one for one in self._observers if one is not observer)

    def on_request_added(self, request: Request, seq: Seq, *, kept: bool) -> None:
        self._notify(lambda one: one.on_request_added(request, seq, kept=kept))

    def on_admission_change(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        self._notify(lambda one: one.on_admission_change(queued, ended))

    def on_request_abort(self, request_id: str) -> None:
        self._notify(lambda one: one.on_request_abort(request_id))

    def on_sequence_abort(self, request_id: str, index: int) -> None:
        self._notify(lambda one: one.on_sequence_abort(request_id, index))

    def on_request_release(self, request_id: str) -> None:
        self._notify(lambda one: one.on_request_release(request_id))

    def on_prefix_cache_reset(self) -> None:
        self._notify(lambda one: one.on_prefix_cache_reset())

    def on_memory_release(self) -> None:
        self._notify(lambda one: one.on_memory_release())

    def on_step_planned(self, plan: StepPlan) -> None:
        self._notify(lambda one: one.on_step_planned(plan))

    def on_step_submitted(self, plan: StepPlan) -> None:
        self._notify(lambda one: one.on_step_submitted(plan))

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        self._notify(lambda one: one.on_step_finished(plan, updates, prompt_tokens, seconds))

    def on_step_failed(self, plan: StepPlan) -> None:
        self._notify(lambda one: one.on_step_failed(plan))

    def on_request_failed(self, request_id: str, message: str) -> None:
        self._notify(lambda one: one.on_request_failed(request_id, message))
