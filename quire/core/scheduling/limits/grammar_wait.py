"""A request whose output is bound waits outside of the queue until its grammar is compiled.

Others pass meanwhile, and a step costs nothing for it. What it asks for is held until its last
sequence has ended, so that whoever samples finds it there, preemptions or not. A form that cannot
be compiled, or a text that cannot be whole within the request's length, ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from quire.core.constraint import Constraint
from quire.core.scheduling.limits.base import NO_BOUND, Limit, WaitResult
from quire.core.snapshot import GrammarStats
from quire.core.types import Request
from quire.errors import EngineError, RequestError, TooLong, Unsupported

CompileOutcome = int | RequestError | EngineError
"""Of a compilation: how many tokens a whole text takes at least, or why there is none."""


class GrammarProvider(Protocol):
    """Compiles elsewhere. quire.grammar.compilation.grammar_cache is one."""

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise Overloaded or RequestError if nobody may wait for this one now."""
        ...

    def acquire(self, constraint: Constraint) -> None:
        """Hold it, from when it is compiled until release(): each ask() needs one."""
        ...

    def release(self, constraint: Constraint) -> None: ...

    def outcomes(self) -> Iterator[tuple[Constraint, CompileOutcome]]:
        """Of those that were asked for: each once, also when several asked."""
        ...

    @property
    def has_outcomes(self) -> bool:
        """outcomes() would yield something."""
        ...

    def set_outcome_callback(self, ring: Callable[[], None]) -> None: ...

    def stats(self) -> GrammarStats: ...

    def prepare(self) -> None:
        """Nothing is to be done just now: make what the first grammar would have to wait for."""
        ...

    def close(self) -> None:
        """End what compiles."""
        ...


class GrammarWait(Limit):
    """grammars: None, and requests that need one are refused, with what is `missing`."""

    def __init__(
        self, grammars: GrammarProvider | None, max_len: int, *, missing: str = "a tokenizer"
    ) -> None:
        self._grammars = grammars
        self._max_len = max_len
        self._missing = missing
        self._waiting: dict[Constraint, dict[str, Request]] = {}

    def check_request(self, request: Request) -> None:
        if request.constraint is None:
            return
        if self._grammars is None:
            message = f"structured output needs {self._missing}, which this engine has not"
            raise Unsupported(message, param="structured_outputs")
        self._grammars.check_constraint(request.constraint)

    def add_request(self, request: Request) -> bool:
        if request.constraint is None or self._grammars is None:
            return False
        self._grammars.acquire(request.constraint)
        self._waiting.setdefault(request.constraint, {})[request.id] = request
        return True

    @property
    def has_wait_results(self) -> bool:
        return self._grammars is not None and self._grammars.has_outcomes

    def set_ready_callback(self, ring: Callable[[], None]) -> None:
        if self._grammars is not None:
            self._grammars.set_outcome_callback(ring)

    def wait_results(self) -> Iterator[WaitResult]:
        if self._grammars is None:
            return
        for constraint, outcome in self._grammars.outcomes():
            for request in self._waiting.pop(constraint, {}).values():
                if isinstance(outcome, int):
                    yield WaitResult(request.id, self._length_error(request, outcome))
                else:
                    yield WaitResult(request.id, outcome)

    def remove_request(self, request: Request) -> None:
        if request.constraint is None or self._grammars is None:
            return
        waiting = self._waiting.get(request.constraint)
        if waiting is not None and waiting.pop(request.id, None) is not None and not waiting:
            del self._waiting[request.constraint]
        self._grammars.release(request.constraint)

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def stats(self) -> GrammarStats | None:
        return None if self._grammars is None else self._grammars.stats()

    def _length_error(self, request: Request, least: int) -> RequestError | None:
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
