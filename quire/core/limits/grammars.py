"""A request whose output is bound waits outside of the queue until its grammar is compiled.

Others pass meanwhile, and a step costs nothing for it. What it asks for is held until its last
sequence has ended, so that whoever samples finds it there, preemptions or not. A form that cannot
be compiled, or a text that cannot be whole within the request's length, ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from quire.core.constraint import Constraint
from quire.core.limits.base import NO_BOUND, Limit, Verdict
from quire.core.snapshot import GrammarFigures
from quire.core.types import Request
from quire.errors import EngineError, RequestError, TooLong, Unsupported

Outcome = int | RequestError | EngineError
"""Of a compilation: how many tokens a whole text takes at least, or why there is none."""


class Grammars(Protocol):
    """Compiles elsewhere. quire.grammar.pool is one."""

    def accept(self, constraint: Constraint) -> None:
        """Raise Overloaded or RequestError if nobody may wait for this one now."""
        ...

    def ask(self, constraint: Constraint) -> None:
        """Hold it, from when it is compiled until release(): each ask() needs one."""
        ...

    def release(self, constraint: Constraint) -> None: ...

    def outcomes(self) -> Iterator[tuple[Constraint, Outcome]]:
        """Of those that were asked for: each once, also when several asked."""
        ...

    @property
    def settled(self) -> bool:
        """outcomes() would yield something."""
        ...

    def call_when_settled(self, ring: Callable[[], None]) -> None: ...

    def figures(self) -> GrammarFigures: ...

    def prepare(self) -> None:
        """Nothing is to be done just now: make what the first grammar would have to wait for."""
        ...

    def close(self) -> None:
        """End what compiles."""
        ...


class GrammarLimit(Limit):
    """grammars: None, and requests that need one are refused, with what is `missing`."""

    def __init__(
        self, grammars: Grammars | None, max_len: int, *, missing: str = "a tokenizer"
    ) -> None:
        self._grammars = grammars
        self._max_len = max_len
        self._missing = missing
        self._waiting: dict[Constraint, dict[str, Request]] = {}

    def accept(self, request: Request) -> None:
        if request.constraint is None:
            return
        if self._grammars is None:
            message = f"structured output needs {self._missing}, which this engine has not"
            raise Unsupported(message, param="structured_outputs")
        self._grammars.accept(request.constraint)

    def keeps(self, request: Request) -> bool:
        if request.constraint is None or self._grammars is None:
            return False
        self._grammars.ask(request.constraint)
        self._waiting.setdefault(request.constraint, {})[request.id] = request
        return True

    @property
    def decided(self) -> bool:
        return self._grammars is not None and self._grammars.settled

    def call_when_decided(self, ring: Callable[[], None]) -> None:
        if self._grammars is not None:
            self._grammars.call_when_settled(ring)

    def verdicts(self) -> Iterator[Verdict]:
        if self._grammars is None:
            return
        for constraint, outcome in self._grammars.outcomes():
            for request in self._waiting.pop(constraint, {}).values():
                if isinstance(outcome, int):
                    yield Verdict(request.id, self._too_short(request, outcome))
                else:
                    yield Verdict(request.id, outcome)

    def forget(self, request: Request) -> None:
        if request.constraint is None or self._grammars is None:
            return
        waiting = self._waiting.get(request.constraint)
        if waiting is not None and waiting.pop(request.id, None) is not None and not waiting:
            del self._waiting[request.constraint]
        self._grammars.release(request.constraint)

    def slack(self) -> int:
        return NO_BOUND

    def figures(self) -> GrammarFigures | None:
        return None if self._grammars is None else self._grammars.figures()

    def _too_short(self, request: Request, least: int) -> RequestError | None:
        """Why a text cannot be whole within the length of the request, if it cannot."""
        most, prompt = request.stop.max_tokens, len(request.prompt)
        if most < least:
            return RequestError(
                f"max_tokens={most} is too small for the structured output asked for: "
                f"the shortest text that is allowed takes {least} tokens",
                param="max_tokens",
            )
        if self._max_len - prompt < least:
            return TooLong(
                f"the prompt has {prompt} tokens and the shortest text that the structured output "
                f"allows takes {least}, but a sequence may have {self._max_len}; shorten the "
                "prompt or raise max_model_len",
                param="prompt",
            )
        return None
