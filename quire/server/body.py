"""Bytes from the network -> a checked body. The only place where a request's body is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from quire.errors import Overloaded, RequestError
from quire.server.errors import BodyTooLarge
from quire.server.presence import ClientGone, at_most
from quire.server.protocol.base import MOST_IDS, Body

B = TypeVar("B", bound=Body)

SLOWEST_S = 120.0
"""Time for a body to come: a connection is not held by sending a byte now and then."""
MOST_STRINGS = 1 << 18
"""Of one body, names of fields included: 100,000 take a tenth of a second to read, and nothing else
is done meanwhile."""
MOST_VALUES = MOST_IDS + MOST_STRINGS
"""Of one body, numbers included: each costs many times the bytes that it is written with."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_FIELD = re.compile(rb'"([^"\\]{1,64})"\s*:\s*-?(?:NaN|Infinity)')
_NO_NUMBER = re.compile(rb"NaN|Infinity")
"""The parser would read them, and pass them on in whatever field no number is expected."""
SMALL_BYTES = 1 << 16
"""Bodies up to this size have room always."""
ROOM_BODIES = 8
"""So many of the largest bodies may be under way at a time."""
LEAST_BYTES = 1 << 23
"""That the largest body is taken to have."""
RETRY_S = 2.0


class Room:
    """Bytes of large bodies that are held until they are read. One a process."""

    def __init__(self, most_bytes: int) -> None:
        self.held = 0
        self._most = most_bytes

    @contextmanager
    def share(self) -> Iterator[_Share]:
        """For one body; given back in the end."""
        share = _Share(self)
        try:
            yield share
        finally:
            self.held -= share.held

    def take(self, size: int) -> None:
        """Raise Overloaded unless there is so much room."""
        if self.held + size > self._most:
            message = "too many large bodies are being received: try again later"
            raise Overloaded(message, retry_after_s=RETRY_S)
        self.held += size


class _Share:
    """What one body holds of a room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.held = 0

    def grow(self, size: int) -> None:
        """The body has so many bytes by now. Raises Overloaded."""
        if size > SMALL_BYTES:
            self._room.take(size - self.held)
            self.held = size


def room_for(limit: int) -> Room:
    """A room where bodies of at most `limit` bytes are received."""
    return Room(ROOM_BODIES * max(limit, LEAST_BYTES))


async def read(http: Request, kind: type[B], limit: int) -> B:
    """The body as a `kind`. Raises ValidationError, RequestError, BodyTooLarge, Overloaded."""
    return kind.model_validate_json(await read_bytes(http, limit))


async def read_bytes(http: Request, limit: int) -> bytes:
    """The body of a request that says it is JSON. Raises RequestError, BodyTooLarge, Overloaded."""
    said = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said != "application/json" and not said.endswith("+json"):
        message = f"send the body as Content-Type: application/json, not {said or 'nothing'!r:.60}"
        raise RequestError(message)
    if http.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise RequestError("send the body as it is: this server unpacks none (Content-Encoding)")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    with http.app.state.room.share() as share:
        try:
            with at_most(SLOWEST_S, "the body"):
                body = await _received(http, limit, share)
        except ClientDisconnect:
            raise ClientGone("the client went away before its body was complete") from None
    _check_values(body)
    return body


def _check_values(body: bytes) -> None:
    """Raise RequestError for more than could be meant. Counted by its signs, before it is read."""
    if body.count(b",") > MOST_VALUES:
        raise RequestError(f"the body must have at most {MOST_VALUES} values")
    if body.count(b'"') - body.count(b'\\"') > 2 * MOST_STRINGS:  # those within texts are free
        raise RequestError(f"the body must have at most {MOST_STRINGS} strings, names included")
    if (b"NaN" in body or b"Infinity" in body) and _NO_NUMBER.search(_STRING.sub(b"", body)):
        field = _FIELD.search(body)
        name = None if field is None else field[1].decode("utf-8", "replace")
        raise RequestError(f"{name or 'the body'}: NaN and Infinity are no numbers", param=name)


async def _received(http: Request, limit: int, share: _Share) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        share.grow(size)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body must have at most {limit} bytes")
