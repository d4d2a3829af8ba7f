"""Who is told of all that an engine has its scheduler do, in order, on the engine's thread.

The seam of what looks on: the beat that others read (quire.engine.pulse), the flight recorder
(quire.engine.recorder). A witness changes nothing, and is quick: it is called in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.core.types import Request, StepPlan, Update


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
    """Several, told one after the other."""

    def __init__(self, all_of_them: Iterable[Witness]) -> None:
        self._all = tuple(all_of_them)

    def added(self, request: Request, *, kept: bool) -> None:
        for one in self._all:
            one.added(request, kept=kept)

    def let_go(self, queued: Sequence[str], ended: Sequence[Update]) -> None:
        for one in self._all:
            one.let_go(queued, ended)

    def aborted(self, request_id: str) -> None:
        for one in self._all:
            one.aborted(request_id)

    def ended(self, request_id: str, index: int) -> None:
        for one in self._all:
            one.ended(request_id, index)

    def released(self, request_id: str) -> None:
        for one in self._all:
            one.released(request_id)

    def forgot(self) -> None:
        for one in self._all:
            one.forgot()

    def planned(self, plan: StepPlan) -> None:
        for one in self._all:
            one.planned(plan)

    def submitted(self, plan: StepPlan) -> None:
        for one in self._all:
            one.submitted(plan)

    def landed(
        self, plan: StepPlan, updates: Sequence[Update], prompt_tokens: int, seconds: float
    ) -> None:
        for one in self._all:
            one.landed(plan, updates, prompt_tokens, seconds)

    def failed(self, plan: StepPlan, updates: Sequence[Update]) -> None:
        for one in self._all:
            one.failed(plan, updates)

    def blamed(self, request_id: str, message: str) -> None:
        for one in self._all:
            one.blamed(request_id, message)
