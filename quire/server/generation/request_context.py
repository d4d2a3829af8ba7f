"""Request context: the properties of a request that are not in its body, read from its headers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from quire.core.params import INT64
from quire.errors import RequestError
from quire.server.app_state import (
    MAX_ID_CHARS,
    REQUEST_ID_SCOPE_KEY,
    AppState,
    get_key_owner,
    get_tenant,
)
from quire.server.auth.api_keys import OPERATOR_OWNER, KeyOwner
from quire.server.generation.client_watch import ClientWatch
from quire.server.telemetry.request_timer import get_request_timer

MAX_TIMEOUT_S = 24 * 3600.0
TIMEOUT_HEADER = "x-request-timeout"
PRIORITY_HEADER = "x-vllm-priority"
RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Properties of a request that are not in its body."""

    public_id: str
    priority: int = 0
    arrived_at: float = 0.0
    body_bytes: int = 0
    """Of the body, in bytes: long ones are prepared in another thread."""
    key_owner: KeyOwner = OPERATOR_OWNER
    """The owner of its API key."""
    deadline_at: float | None = None
    """When the client gives up."""
    timeout_s: float | None = None
    """Seconds from its arrival to then."""
    rank: int | None = None
    """Of the engine that must run it; None: any."""


def read_request_context(
    state: AppState,
    http: Request,
    prefix: str,
    arrived_at: float,
    *,
    priority: int | None,
    request_id: str | None,
) -> RequestContext:
    """Read the headers of a request. prefix: of its public id. Raises RequestError.

    priority, request_id: those of its body.
    """
    timeout_s = _timeout_s(http.headers)
    length = http.headers.get("content-length", "")
    return RequestContext(
        _public_id(prefix, http, request_id),
        _priority(state, priority, http.headers),
        arrived_at,
        int(length) if length.isdecimal() else 0,
        get_key_owner(http),
        None if timeout_s is None else arrived_at + timeout_s,
        timeout_s,
        _rank(state, http.headers),
    )


@contextmanager
def watch_request(state: AppState, http: Request, prefix: str) -> Iterator[RequestContext]:
    """Around the awaits of a request that has no generation of its own: yields its context.

    Raises what ends it: the client leaves, its time is over, or it is cancelled by its id.
    """
    since = get_request_timer(http).received_at
    context = read_request_context(state, http, prefix, since, priority=None, request_id=None)
    watch = ClientWatch(http.receive, context.timeout_s, since=since, tenant=get_tenant(http))
    watch.register(state.active_requests, context.public_id)
    try:
        with watch.raise_when_ended():
            yield context
    finally:
        watch.stop()


def _rank(state: AppState, headers: Mapping[str, str]) -> int | None:
    """The header X-data-parallel-rank."""
    given = headers.get(RANK_HEADER)
    if given is None:
        return None
    ranks = state.engine.ranks
    if not (given.isascii() and given.isdecimal() and len(given) <= 6 and int(given) in ranks):
        message = f"X-data-parallel-rank must be in [{ranks[0]}, {ranks[-1]}], got {given!r:.40}"
        raise RequestError(message, param="X-data-parallel-rank")
    return int(given)


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the client waits: its header X-Request-Timeout."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"X-Request-Timeout must be seconds in (0, {MAX_TIMEOUT_S:g}], got {given!r:.40}"
        raise RequestError(message, param="X-Request-Timeout")
    return seconds


def _priority(state: AppState, asked: int | None, headers: Mapping[str, str]) -> int:
    """The header X-Vllm-Priority, or else the field of the body."""
    wanted, param = asked or 0, "priority"
    given = headers.get(PRIORITY_HEADER)
    if given is not None:
        param = "X-Vllm-Priority"
        if not (given.isascii() and given.removeprefix("-").isdecimal() and len(given) <= 20):
            raise RequestError(f"{param} must be an integer, got {given!r:.40}", param=param)
        wanted = int(given)
    if wanted not in INT64:
        raise RequestError(f"{param} must be a 64-bit integer, got {wanted}", param=param)
    if wanted and not state.has_priority_scheduling:
        message = f"priority {wanted} needs a server with --scheduling-policy priority"
        raise RequestError(message, param=param)
    return wanted


def _public_id(prefix: str, http: Request, wanted: str | None) -> str:
    """The id in answers and logs: from its header X-Request-Id, or from the body, or a new one.

    prefix: with its separator, "chatcmpl-".
    """
    base = http.headers.get("x-request-id") or wanted
    base = base or http.scope.get(REQUEST_ID_SCOPE_KEY) or uuid.uuid4().hex
    if len(base) > MAX_ID_CHARS or not base.isprintable():
        message = f"a request id must have at most {MAX_ID_CHARS} printable characters"
        raise RequestError(message, param="request_id")
    return prefix + base
