"""Answers that take long: event streams and plain ones, both ended when the client goes away.

A disconnect closes the generation, which aborts it in the engine and ends its iteration; so no
task is cancelled in the middle of anything. Events are one `data:` line each and end with [DONE];
an error after the beginning is an event too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.outputs import RequestOutput
from quire.server.errors import error_body
from quire.server.generation import Generation

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
_encode = msgspec.json.Encoder().encode


def event(chunk: dict[str, Any]) -> bytes:
    """One event. JSON has no raw line break, so it is one line."""
    return b"data: " + _encode(chunk) + b"\n\n"


def json_response(body: dict[str, Any]) -> Response:
    """A plain answer, without pydantic."""
    return Response(_encode(body), media_type="application/json")


@asynccontextmanager
async def closed_if_gone(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    """Call close() when the client disconnects, and in any case at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        close()


async def answer(
    http: Request, generation: Generation, shape: Callable[[list[RequestOutput]], dict[str, Any]]
) -> Response:
    """The plain answer, once all results are there."""
    async with closed_if_gone(http.receive, generation.close):
        results = await generation.results()
    if results is None:
        return Response(status_code=CLIENT_GONE)  # nobody reads it
    return json_response(shape(results))


class EventStream(Response):
    """A stream of events. `close` is called when it ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events = events
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closed_if_gone(receive, self._close):
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._guarded():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._events:
                yield data
        except Exception as error:  # noqa: BLE001 - the border: headers are sent, so it is an event
            yield event(error_body(error)[1])
        yield DONE
