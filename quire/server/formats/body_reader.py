"""Reads and checks request bodies: from bytes of the network to a pydantic model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from quire.errors import Overloaded, RequestError
from quire.server.errors import BodyTooLarge
from quire.server.formats.request_body import MAX_TOKEN_IDS, RequestBody
from quire.server.generation.client_watch import ClientDisconnected, time_limit

B = TypeVar("B", bound=RequestBody)

BODY_TIMEOUT_S = 120.0
"""Time for a body to come: a connection is not held by sending a byte now and then."""
MAX_STRINGS = 1 << 18
"""Of one body, names of fields included: 100,000 take a tenth of a second to read, and nothing else
is done meanwhile."""
MAX_CONTAINERS = 1 << 17
"""Lists and objects of one body: each takes a microsecond to make."""
MAX_VALUES = MAX_TOKEN_IDS + MAX_STRINGS
"""Of one body, numbers included: each costs many times the bytes that it is written with."""
_FIELD = re.compile(rb'"([^"\\]{1,64})"\s*:\s*-?(?:NaN|Infinity)')
_NON_FINITE = re.compile(rb"NaN|Infinity")
"""The parser would read them, and pass them on in whatever field no number is expected."""
SMALL_BYTES = 1 << 16
"""Bodies up to this size are always accepted."""
BUDGET_BODIES = 8
"""So many of the largest bodies may be under way at a time."""
MIN_LARGEST_BODY_BYTES = 1 << 23
"""That the largest body is taken to have."""
BODY_RETRY_AFTER_S = 2.0


class BodyMemoryBudget:
    """Bytes of large bodies that are held until they are read. One a process."""

    def __init__(self, most_bytes: int) -> None:
        self.reserved_bytes = 0
        self._max_bytes = most_bytes

    @contextmanager
    def reserve(self) -> Iterator[_BodyReservation]:
        """For one body; given back in the end."""
        reserve = _BodyReservation(self)
        try:
            yield reserve
        finally:
            self.reserved_bytes -= reserve.reserved_bytes

    def acquire(self, size: int) -> None:
        """Reserve memory. Raises Overloaded if the budget is used up."""
        if self.reserved_bytes + size > self._max_bytes:
            message = "too many large bodies are being received: try again later"
            raise Overloaded(message, retry_after_s=BODY_RETRY_AFTER_S)
        self.reserved_bytes += size


class _BodyReservation:
    """The memory that one body holds of a budget."""

    def __init__(self, budget: BodyMemoryBudget) -> None:
        self._budget = budget
        self.reserved_bytes = 0

    def grow(self, size: int) -> None:
        """The body has so many bytes by now. Raises Overloaded."""
        if size > SMALL_BYTES:
            self._budget.acquire(size - self.reserved_bytes)
            self.reserved_bytes = size


def build_body_budget(limit: int) -> BodyMemoryBudget:
    """The budget for bodies of at most `limit` bytes."""
    return BodyMemoryBudget(BUDGET_BODIES * max(limit, MIN_LARGEST_BODY_BYTES))


async def read_body(http: Request, kind: type[B], limit: int) -> B:
    """The body as a `kind`. Raises ValidationError, RequestError, BodyTooLarge, Overloaded."""
    return kind.model_validate_json(await read_json_bytes(http, limit))


async def read_json_bytes(http: Request, limit: int) -> bytes:
    """The body of a JSON request. Raises RequestError, BodyTooLarge, Overloaded."""
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        message = (
            f"send the body as Content-Type: application/json, not {media_type or 'nothing'!r:.60}"
        )
        raise RequestError(message)
    body = await read_bytes(http, limit)
    _check_value_count(body)
    return body


async def read_bytes(http: Request, limit: int) -> bytes:
    """The body of any request. Raises RequestError, BodyTooLarge, Overloaded."""
    if http.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise RequestError(
            "send the body without Content-Encoding: this server does not unpack bodies"
        )
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    with http.app.state.body_budget.reserve() as reservation:
        try:
            with time_limit(BODY_TIMEOUT_S, "the body"):
                body = await _receive_bytes(http, limit, reservation)
        except ClientDisconnect:
            raise ClientDisconnected("the client went away before its body was complete") from None
    return body


def _check_value_count(body: bytes) -> None:
    """Raise RequestError for more than could be meant. Counted by its signs, before it is read."""
    if body.count(b",") > MAX_VALUES:
        raise RequestError(f"the body must have at most {MAX_VALUES} values")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:  # those within texts are free
        raise RequestError(f"the body must have at most {MAX_STRINGS} strings, names included")
    has_many = body.count(b"[") + body.count(b"{") > MAX_CONTAINERS
    has_names = b"NaN" in body or b"Infinity" in body
    if not has_many and not has_names:
        return
    bare = _without_strings(body)
    if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
        raise RequestError(f"the body must have at most {MAX_CONTAINERS} lists and objects")
    if _NON_FINITE.search(bare):
        field = _FIELD.search(body)
        name = None if field is None else field[1].decode("utf-8", "replace")
        raise RequestError(
            f"{name or 'the body'}: NaN and Infinity are not numbers of JSON", param=name
        )


def _without_strings(body: bytes) -> bytes:
    """JSON without its strings: a regular expression takes ten times as long on a large body."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


async def _receive_bytes(http: Request, limit: int, reservation: _BodyReservation) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        reservation.grow(size)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body must have at most {limit} bytes")
