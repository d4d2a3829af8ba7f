"""Grammars as named resources: a request with a constraint waits until its grammar is compiled.

The grammar is held until the last sequence of the request has ended, so that the sampler finds it
also after preemptions. A grammar that cannot be compiled, or whose shortest text exceeds the length
of the request, ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Protocol

from quire.core.constraint import Constraint
from quire.core.scheduling.waiting import ResourceProvider, ResourceWaits
from quire.core.snapshot import GrammarStats
from quire.core.types import Request
from quire.errors import EngineError, RequestError, TooLong, Unsupported

CompileOutcome = int | RequestError | EngineError
"""The minimal number of tokens of a complete text, or the error of the compilation."""


class GrammarProvider(Protocol):
    """Compiles grammars elsewhere. quire.grammar.compilation.grammar_cache implements it."""

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise Overloaded or RequestError if no request may wait for this grammar now."""
        ...

    def acquire(self, constraint: Constraint) -> None:
        """Compile it, and hold it until release(): each acquire() needs one."""
        ...

    def release(self, constraint: Constraint) -> None: ...

    def outcomes(self) -> Iterator[tuple[Constraint, CompileOutcome]]:
        """Yield the outcomes of requested grammars: each once, also for several requests."""
        ...

    @property
    def has_outcomes(self) -> bool:
        """Whether outcomes() would yield something."""
        ...

    def set_outcome_callback(self, callback: Callable[[], None]) -> None: ...

    def stats(self) -> GrammarStats: ...

    def prepare(self) -> None:
        """Prepare what the first compilation needs. Called when the engine is idle."""
        ...

    def close(self) -> None:
        """Stop the compiler."""
        ...


class GrammarWait(ResourceProvider):
    """Provides compiled grammars; the name of one is its constraint.

    grammars: None refuses requests that need one, with what is `missing`.
    """

    def __init__(
        self, grammars: GrammarProvider | None, max_len: int, *, missing: str = "a tokenizer"
    ) -> None:
        self._grammars = grammars
        self._max_len = max_len
        self._missing = missing

    def check_request(self, request: Request) -> None:
        if request.constraint is None:
            return
        if self._grammars is None:
            message = f"structured output needs {self._missing}, which this engine lacks"
            raise Unsupported(message, param="structured_outputs")
        self._grammars.check_constraint(request.constraint)

    def request(self, request: Request) -> Iterable[Hashable]:
        if request.constraint is None or self._grammars is None:
            return ()
        self._grammars.acquire(request.constraint)
        return (request.constraint,)

    def release(self, request: Request) -> None:
        if request.constraint is not None and self._grammars is not None:
            self._grammars.release(request.constraint)

    @property
    def has_outcomes(self) -> bool:
        return self._grammars is not None and self._grammars.has_outcomes

    def report(self, waits: ResourceWaits) -> None:
        if self._grammars is None:
            return
        for constraint, outcome in self._grammars.outcomes():
            if isinstance(outcome, int):
                waits.ready(constraint, partial(self._length_error, least=outcome))
            else:
                waits.failed(constraint, outcome)

    def set_outcome_callback(self, callback: Callable[[], None]) -> None:
        if self._grammars is not None:
            self._grammars.set_outcome_callback(callback)

    def stats(self) -> GrammarStats | None:
        return None if self._grammars is None else self._grammars.stats()

    def _length_error(self, request: Request, least: int) -> RequestError | None:
        """Return the error if no text can be complete within the length of the request."""
        most, prompt = request.stop.max_tokens, len(request.prompt)
        if most < least:
            return RequestError(
                f"max_tokens={most} is too small for the requested structured output: "
                f"the shortest allowed text has {least} tokens",
                param="max_tokens",
            )
        if self._max_len - prompt < least:
            return TooLong(
                f"the prompt has {prompt} tokens and the shortest text that the structured output "
                f"allows has {least}, but a sequence may have {self._max_len}; shorten the "
                "prompt or raise max_model_len",
                param="prompt",
            )
        return None
