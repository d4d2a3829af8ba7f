"""Bytes from the network -> a checked body. The only place where a request's body is read."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from quire.errors import RequestError
from quire.server.errors import BodyTooLarge
from quire.server.presence import ClientGone, at_most
from quire.server.protocol.base import Body

B = TypeVar("B", bound=Body)

SLOWEST_S = 120.0
"""Time for a body to come: a connection is not held by sending a byte now and then."""


async def read(http: Request, kind: type[B], limit: int) -> B:
    """The body as a `kind`. Raises ValidationError, RequestError, BodyTooLarge."""
    return kind.model_validate_json(await read_bytes(http, limit))


async def read_bytes(http: Request, limit: int) -> bytes:
    """The body of a request that says it is JSON. Raises RequestError, BodyTooLarge."""
    said = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said != "application/json" and not said.endswith("+json"):
        message = f"send the body as Content-Type: application/json, not {said or 'nothing'!r:.60}"
        raise RequestError(message)
    too_large = BodyTooLarge(f"the body must have at most {limit} bytes")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        with at_most(SLOWEST_S, "the body"):
            async for chunk in http.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone("the client went away before its body was complete") from None
    return b"".join(chunks)
