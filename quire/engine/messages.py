"""What an engine and those who ask it say to each other. Plain data; quire.engine.wire makes bytes.

    asker                           engine
    Hello                     ──▶
                              ◀──   Ready, or Dead: another protocol
    Add, Call                 ──▶
                              ◀──   News: an Answer by the same number
    Abort, AbortSequence      ──▶
                              ◀──   News: the updates of a turn; Beat: a sign of life
                              ◀──   Dead: the last word

Nothing here is an object of Python's own (no functions, no pickles), so that both ends may be
different processes. A change of any of these is a new PROTOCOL.
"""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from operator import attrgetter
from typing import Any

import msgspec

from quire import errors
from quire.core.constraint import Constraint
from quire.core.params import RepetitionDetectionParams as Repetition
from quire.core.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.core.terms import Terms
from quire.core.types import Request, Stop, Thinking, Update
from quire.errors import (
    EngineAway,
    EngineError,
    Overloaded,
    QuireError,
    RequestError,
    Unsupported,
)

PROTOCOL = 5


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all."""


# -- to the engine ------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    protocol: int
    name: str  # who asks, for the log


class Carried(msgspec.Struct, array_like=True, frozen=True):
    """A Request, field by field; of its params only what differs from the defaults."""

    id: str
    prompt: tuple[int, ...]
    stop: Stop
    params: dict[str, Any]
    n: int
    seed: int
    priority: int
    arrived_at: float
    salt: bytes
    read_prefix_cache: bool
    parent: str | None
    hold: bool
    timed: bool
    constraint: Constraint | None
    thinking: Thinking | None
    spoken: tuple[tuple[int, ...] | None, ...]
    suspect: int
    tenant: bytes
    terms: Terms
    deadline_at: float | None


class Add(Message, frozen=True):
    """Run these, all or none."""

    number: int
    requests: list[Carried]


class Abort(Message, frozen=True):
    request_ids: list[str]


class AbortSequence(Message, frozen=True):
    request_id: str
    index: int


class Call(Message, frozen=True):
    """Call one of the service's methods by name, between two steps."""

    number: int
    name: str
    args: list[Any]


ToEngine = Hello | Add | Abort | AbortSequence | Call


# -- from the engine ----------------------------------------------------------------------------


class Ready(Message, frozen=True):
    protocol: int


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An error, by the name of its class in quire.errors."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    reason: str = ""
    numbers: dict[str, float] = {}


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """To the Add or Call of this number."""

    number: int
    value: Any = None
    fault: Fault | None = None


class News(Message, frozen=True):
    """All that one turn has for one asker."""

    updates: list[Update]
    answers: list[Answer]


class Beat(Message, frozen=True):
    """The engine lives. asleep: what of it sleeps, see quire.engine.sleep."""

    asleep: tuple[str, ...]


class Dead(Message, frozen=True):
    """mixed: it does not speak to this sender, and no other engine of this version would."""

    why: str
    mixed: bool = False


FromEngine = Ready | News | Beat | Dead


# -- requests -----------------------------------------------------------------------------------

_FIELDS = tuple(one.name for one in dataclasses.fields(Request))  # Carried has the same
_values = attrgetter(*_FIELDS)
_PARAMS = _FIELDS.index("params")
_DEFAULTS = vars(SamplingParams())
_KINDS = {
    "output_kind": RequestOutputKind,
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": Repetition,
}
"""Fields of SamplingParams that arrive as plain data and are more than that."""


def carried(request: Request) -> Carried:
    """What travels of a request. Raises Unsupported for what only lives in one process."""
    if request.params.logits_processors:
        message = "logits_processors that are functions work offline only (LLM.generate)"
        raise Unsupported(message, param="logits_processors")
    values = list(_values(request))
    given = vars(request.params)
    values[_PARAMS] = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
    return Carried(*values)


_TELLING = frozenset(("output_kind", "stream_interval"))
"""Fields of SamplingParams that change nothing of what is computed."""


def fingerprint(request: Request) -> bytes:
    """Of what a request asks to be computed, whoever asks."""
    stop, params = request.stop, vars(request.params)
    asked = (
        request.prompt,
        (stop.max_tokens, stop.min_tokens, sorted(stop.eos_ids), sorted(stop.token_ids)),
        sorted((name, repr(params[name])) for name in params.keys() - _TELLING),
        (request.n, request.constraint, request.thinking),
    )
    return sha256(repr(asked).encode()).digest()


def request_of(one: Carried) -> Request:
    """The request that was carried. Its params were checked where they came from."""
    values = [getattr(one, name) for name in _FIELDS]
    params = object.__new__(SamplingParams)
    made = vars(params)
    for name, value in _DEFAULTS.items():
        made[name] = value.copy() if type(value) is list else value
    made.update(one.params)
    for name in _KINDS.keys() & one.params.keys():
        made[name] = msgspec.convert(one.params[name], _KINDS[name])
    values[_PARAMS] = params
    return Request(*values)


# -- errors -------------------------------------------------------------------------------------

_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, QuireError)
}
_ERRORS["AssertionError"] = AssertionError


def fault_of(error: Exception) -> Fault:
    """An error as it travels. What is none of ours is named in the message."""
    kind = type(error).__name__
    if kind not in _ERRORS:
        return Fault("EngineError", f"{kind}: {error}")
    param = error.param if isinstance(error, RequestError) else None
    after = error.retry_after_s if isinstance(error, (Overloaded, EngineAway)) else None
    if isinstance(error, Overloaded):
        return Fault(kind, str(error), param, after, error.reason, error.numbers)
    return Fault(kind, str(error), param, after)


def error_of(fault: Fault) -> Exception:
    """The error that travelled."""
    kind = _ERRORS.get(fault.kind, EngineError)
    if issubclass(kind, RequestError):
        return kind(fault.message, param=fault.param)
    after = fault.retry_after_s or 0.0
    if issubclass(kind, Overloaded):
        numbers = fault.numbers
        return kind(fault.message, retry_after_s=after, reason=fault.reason, numbers=numbers)
    if issubclass(kind, EngineAway):
        return kind(fault.message, retry_after_s=after)
    return kind(fault.message)
