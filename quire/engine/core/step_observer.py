"""Who is told of all that an engine has its scheduler do, in order, on the engine's thread.

The seam of what looks on: the beat that others read (quire.engine.heartbeat_page), the flight
recorder
(quire.engine.recording.flight_recorder). A witness changes nothing, and is quick: it is called in
every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from quire.core.types import Request, StepPlan, Update

log = logging.getLogger(__name__)


class StepObserver:
    """Sees everything, and does nothing with it: what it is made into says what is of interest."""

    def on_request_added(self, request: Request, *, kept: bool) -> None:
        """The scheduler took it in. kept: a limit keeps it out of the queue, until let_go()."""

    def on_admission_change(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        """Requests that were kept out: who is in the queue now, and who has ended."""

    def on_request_abort(self, request_id: str) -> None:
        """A request is about to be ended."""

    def on_sequence_abort(self, request_id: str, index: int) -> None:
        """A sequence is about to be ended, by a stop string."""

    def on_request_release(self, request_id: str) -> None:
        """The blocks of a request are held no longer."""

    def on_prefix_cache_reset(self) -> None:
        """The prefix cache was emptied."""

    def on_step_planned(self, plan: StepPlan) -> None:
        """A plan was made, and goes to the executor right now."""

    def on_step_submitted(self, plan: StepPlan) -> None:
        """The executor has it."""

    def on_step_finished(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        """The oldest plan was applied, and the scheduler learnt this of it."""

    def on_step_failed(self, plan: StepPlan) -> None:
        """The oldest plan raised; the scheduler was told."""

    def on_request_failed(self, request_id: str, message: str) -> None:
        """A request was ended, because steps fail with it."""


class CompositeStepObserver(StepObserver):
    """Several, told one after the other.

    One that raises is told nothing any more: who looks on must not hurt what goes on.
    """

    def __init__(self, all_of_them: Iterable[StepObserver]) -> None:
        self._observers = tuple(all_of_them)

    def _notify(self, tell: Callable[[StepObserver], None]) -> None:
        for one in self._observers:
            try:
                tell(one)
            except Exception:  # noqa: BLE001 - a border, it is logged
                self._remove(one)

    def _remove(self, witness: StepObserver) -> None:
        log.exception("%s is switched off: it failed", type(witness).__name__)
        self._observers = tuple(one for one in self._observers if one is not witness)

    def on_request_added(self, request: Request, *, kept: bool) -> None:
        self._notify(lambda one: one.on_request_added(request, kept=kept))

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
