"""Engine messages: plain data between an engine and its clients.

    client                          engine
    Hello                     ──▶
                              ◀──   EngineReady, or EngineDeadMessage: another protocol version
    AddRequests, UtilityCall  ──▶
                              ◀──   OutputBatch: a CallReply with the same call_id
    AbortRequests,
    AbortSequence             ──▶
                              ◀──   OutputBatch: the updates of a step; HeartbeatMessage
                              ◀──   EngineDeadMessage: the last one

No message has functions or pickled objects, so both ends may be different processes.
quire.engine.message_codec encodes them. Any change is a new PROTOCOL_VERSION.
"""

from __future__ import annotations

import dataclasses
from hashlib import sha256
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from quire import errors
from quire.core.constraint import Constraint
from quire.core.params import RepetitionDetectionParams as Repetition
from quire.core.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.core.scheduler_stats import EngineLoad
from quire.core.tenant_limits import TenantLimits
from quire.core.types import (
    AdapterRef,
    ForcedTokens,
    MediaItem,
    Pooling,
    PromptEmbeds,
    Request,
    StopConditions,
    ThinkingBudget,
    Update,
)
from quire.errors import (
    EngineAway,
    EngineError,
    Overloaded,
    QuireError,
    RequestError,
    Unsupported,
)

PROTOCOL_VERSION = 17
HEARTBEAT_INTERVAL_S = 1.0
"""An engine sends a heartbeat at least this often, unless a step takes longer."""


class EngineMessage(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


# -- to the engine ------------------------------------------------------------------------------


class Hello(EngineMessage, frozen=True):
    protocol: int
    client_name: str  # for the log


class WireRequest(msgspec.Struct, array_like=True, frozen=True):
    """A Request, field by field. Its params are those that differ from the defaults."""

    id: str
    prompt: tuple[int, ...]
    stop: StopConditions
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
    thinking: ThinkingBudget | None
    resumed_tokens: tuple[tuple[int, ...] | None, ...]
    engine_crashes: int
    tenant: bytes
    tenant_limits: TenantLimits
    deadline_at: float | None
    pooling: Pooling | None
    token_types: bytes
    extra_content: tuple[tuple[int, bytes], ...]
    num_beams: int
    prompt_embeds: tuple[PromptEmbeds, ...]
    encoder_prompt: tuple[int, ...]
    encoder_media: MediaItem | None
    forced: ForcedTokens | None
    adapter: AdapterRef | None
    media: tuple[MediaItem, ...]
    rope_positions: bytes
    rope_delta: int
    bidirectional_tokens: int
    speculates: bool
    prediction: tuple[int, ...]


class AdapterCard(NamedTuple):
    """A registered adapter, for clients."""

    name: str
    digest: bytes
    folder: str
    base_model_name: str | None
    created: int  # seconds since 1970
    tenant: bytes = b""  # the only one that may use it; b"": all may

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.digest, self.folder)


class AdapterLoad(NamedTuple):
    """The arguments of load_adapter: an adapter, and what its name will mean it for."""

    name: str
    given: str  # a folder, or a name of the hub
    base_model_name: str | None = None
    if_loaded: Literal["refuse", "replace", "keep"] = "refuse"
    allowed: list[str] | None = None  # folders that it must lie in; None: any
    remote: bool = True  # names of the hub are followed
    subfolder: str = ""  # of a repository of the hub
    tenant: bytes = b""  # as in AdapterCard
    max_names: int | None = None  # that the tenant may have


class AddRequests(EngineMessage, frozen=True):
    """Run these requests, all or none."""

    call_id: int
    requests: list[WireRequest]


class AbortRequests(EngineMessage, frozen=True):
    request_ids: list[str]


class AbortSequence(EngineMessage, frozen=True):
    request_id: str
    index: int


class UtilityCall(EngineMessage, frozen=True):
    """Call a method of EngineRpc by name, between two steps."""

    call_id: int
    method: str
    args: list[Any]


MessageToEngine = Hello | AddRequests | AbortRequests | AbortSequence | UtilityCall


# -- from the engine ----------------------------------------------------------------------------


class EngineReady(EngineMessage, frozen=True):
    protocol: int
    clock: float  # the monotonic clock of the engine's machine, in seconds


class WireError(msgspec.Struct, array_like=True, frozen=True):
    """An error, by the name of its class in quire.errors."""

    error_type: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    reason: str = ""
    details: dict[str, float] = {}


class CallReply(msgspec.Struct, array_like=True, frozen=True):
    """The result of the AddRequests or UtilityCall with this call_id."""

    call_id: int
    result: Any = None
    error: WireError | None = None


class OutputBatch(EngineMessage, frozen=True):
    """All outputs of one step for one client. load: after the step."""

    updates: list[Update]
    replies: list[CallReply]
    load: EngineLoad = EngineLoad()


class HeartbeatMessage(EngineMessage, frozen=True):
    """The engine is alive. sleeping_tags: its sleeping parts, see quire.engine.core.sleep_mode."""

    sleeping_tags: tuple[str, ...]


class EngineDeadMessage(EngineMessage, frozen=True):
    """The engine died. version_mismatch: it is alive, but has another protocol version."""

    reason: str
    version_mismatch: bool = False


MessageFromEngine = EngineReady | OutputBatch | HeartbeatMessage | EngineDeadMessage


# -- requests -----------------------------------------------------------------------------------

_REQUEST_FIELDS = tuple(one.name for one in dataclasses.fields(Request))  # WireRequest has the same
_request_values = attrgetter(*_REQUEST_FIELDS)
_PARAMS_INDEX = _REQUEST_FIELDS.index("params")
_DEFAULT_PARAMS = vars(SamplingParams())
_STRUCT_PARAMS = {
    "output_kind": RequestOutputKind,
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": Repetition,
}
"""Fields of SamplingParams that are decoded as plain data and must be converted."""


def request_to_wire(request: Request) -> WireRequest:
    """Convert a request. Raises Unsupported for logits processors that are functions."""
    if request.params.logits_processors:
        message = "logits_processors that are functions work offline only (LLM.generate)"
        raise Unsupported(message, param="logits_processors")
    values = list(_request_values(request))
    given = vars(request.params)
    values[_PARAMS_INDEX] = {
        name: value for name, value in given.items() if value != _DEFAULT_PARAMS.get(name)
    }
    return WireRequest(*values)


_OUTPUT_ONLY_PARAMS = frozenset(("output_kind", "stream_interval"))
"""Fields of SamplingParams that do not affect the computation."""


def fingerprint(request: Request) -> bytes:
    """A digest of what a request computes, the same for every client."""
    stop, params = request.stop, vars(request.params)
    content = (
        request.prompt,
        (stop.max_tokens, stop.min_tokens, sorted(stop.eos_ids), sorted(stop.token_ids)),
        sorted((name, repr(params[name])) for name in params.keys() - _OUTPUT_ONLY_PARAMS),
        (request.n, request.constraint, request.thinking, request.extra_content),
        (request.pooling, request.token_types),
    )
    return sha256(repr(content).encode()).digest()


def request_from_wire(one: WireRequest) -> Request:
    """Convert back. The params are not checked again."""
    values = [getattr(one, name) for name in _REQUEST_FIELDS]
    params = object.__new__(SamplingParams)
    fields_by_name = vars(params)
    for name, value in _DEFAULT_PARAMS.items():
        fields_by_name[name] = value.copy() if type(value) is list else value
    fields_by_name.update(one.params)
    for name in _STRUCT_PARAMS.keys() & one.params.keys():
        fields_by_name[name] = msgspec.convert(one.params[name], _STRUCT_PARAMS[name])
    values[_PARAMS_INDEX] = params
    return Request(*values)


# -- errors -------------------------------------------------------------------------------------

_ERROR_TYPES: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, QuireError)
}
_ERROR_TYPES["AssertionError"] = AssertionError


def error_to_wire(error: Exception) -> WireError:
    """Convert an error. A class outside quire.errors is named in the message."""
    kind = type(error).__name__
    if kind not in _ERROR_TYPES:
        return WireError("EngineError", f"{kind}: {error}")
    param = error.param if isinstance(error, RequestError) else None
    after = error.retry_after_s if isinstance(error, (Overloaded, EngineAway)) else None
    if isinstance(error, Overloaded):
        return WireError(kind, str(error), param, after, error.reason, error.numbers)
    return WireError(kind, str(error), param, after)


def error_from_wire(fault: WireError) -> Exception:
    """Convert back."""
    kind = _ERROR_TYPES.get(fault.error_type, EngineError)
    if issubclass(kind, RequestError):
        return kind(fault.message, param=fault.param)
    after = fault.retry_after_s or 0.0
    if issubclass(kind, Overloaded):
        numbers = fault.details
        return kind(fault.message, retry_after_s=after, reason=fault.reason, numbers=numbers)
    if issubclass(kind, EngineAway):
        return kind(fault.message, retry_after_s=after)
    return kind(fault.message)
