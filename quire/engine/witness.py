"""Who is told of all that an engine has its scheduler do, in order, on the engine's thread.

The seam of what looks on: the beat that others read (quire.engine.pulse), the flight recorder
(quire.engine.recorder). A witness changes nothing, and is quick: it is called in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from quire.core.types import Request, StepPlan, Update

log = logging.getLogger(__name__)


class Witness:
    """Sees everything, and does nothing with it: what it is made into says what is of interest."""

    def added(self, request: Request, *, kept: bool) -> None:
        """The scheduler took it in. kept: a limit keeps it out of the queue, until let_go()."""

    def let_go(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        """Requests that were kept out: who is in the queue now, and who has ended."""

    def aborted(self, request_id: str) -> None:
        """A request is about to be ended."""

    def ended(self, request_id: str, index: int) -> None:
        """A sequence is about to be ended, by a stop string."""

    def released(self, request_id: str) -> None:
        """The blocks of a request are held no longer."""

    def forgot(self) -> None:
        """The prefix cache was emptied."""

    def planned(self, plan: StepPlan) -> None:
        """A plan was made, and goes to the executor right now."""

    def submitted(self, plan: StepPlan) -> None:
        """The executor has it."""

    def landed(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        """The oldest plan was applied, and the scheduler learnt this of it."""

    def failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        """The oldest plan raised; the scheduler was told."""

    def blamed(self, request_id: str, message: str) -> None:
        """A request was ended, because steps fail with it."""


class Witnesses(Witness):
    """Several, told one after the other.

    One that raises is told nothing any more: who looks on must not hurt what goes on.
    """

    def __init__(self, all_of_them: Iterable[Witness]) -> None:
        self._all = tuple(all_of_them)

    def _each(self, tell: Callable[[Witness], None]) -> None:
        for one in self._all:
            try:
                tell(one)
            except Exception:  # noqa: BLE001 - a border, it is logged
                self._lose(one)

    def _lose(self, witness: Witness) -> None:
        log.exception("%s is switched off: it failed", type(witness).__name__)
        self._all = tuple(one for one in self._all if one is not witness)

    def added(self, request: Request, *, kept: bool) -> None:
        self._each(lambda one: one.added(request, kept=kept))

    def let_go(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        self._each(lambda one: one.let_go(queued, ended))

    def aborted(self, request_id: str) -> None:
        self._each(lambda one: one.aborted(request_id))

    def ended(self, request_id: str, index: int) -> None:
        self._each(lambda one: one.ended(request_id, index))

    def released(self, request_id: str) -> None:
        self._each(lambda one: one.released(request_id))

    def forgot(self) -> None:
        self._each(lambda one: one.forgot())

    def planned(self, plan: StepPlan) -> None:
        self._each(lambda one: one.planned(plan))

    def submitted(self, plan: StepPlan) -> None:
        self._each(lambda one: one.submitted(plan))

    def landed(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        self._each(lambda one: one.landed(plan, updates, prompt_tokens, seconds))

    def failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        self._each(lambda one: one.failed(plan, updates))

    def blamed(self, request_id: str, message: str) -> None:
        self._each(lambda one: one.blamed(request_id, message))
