"""Sends answers, streamed or whole. A client that disconnects ends the answer and its work.

A stream is one loop: updates in, events, bytes, one send() a turn. The API's `StreamFormatter`
turns events into bytes; it is called and never awaited, and no task is made for a chunk. An error
after the first byte is an event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import CLIENT_CLOSED_REQUEST, build_error_body
from quire.server.formats import ignored_fields
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.generation.client_watch import ClientDisconnected
from quire.server.generation.events import FullResponse, GenerationEvent
from quire.server.generation.generation_stream import GenerationStream
from quire.server.generation.off_loop import LONG_OUTPUT_TOKENS, run_off_loop

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
STALL_TIMEOUT_S = 120.0
"""A client that takes nothing for so long, while there is something to take, has gone."""
encode = msgspec.json.Encoder().encode


class StreamFormatter(Protocol):
    """Writes the events of one API. One for each response; it may have state."""

    media_type: str

    def format_start(self) -> bytes:
        """Bytes to send before the first event; may be none."""
        ...

    def format_events(self, events: list[GenerationEvent]) -> bytes:
        """The chunks for the events of a turn; b"" sends nothing. The last event is a Closing."""
        ...

    def format_error(self, error: Exception) -> bytes:
        """Bytes to send in place of the rest."""
        ...

    @property
    def end(self) -> bytes:
        """Bytes to send last, after an error too."""
        ...


class FullFormatter(Protocol):
    """Writes the whole response of one API."""

    def format_full(self, whole: FullResponse) -> dict[str, Any]: ...


class StreamOrFullFormatter(StreamFormatter, FullFormatter, Protocol):
    """Writes the whole response of one API, or its events."""


def encode_sse(chunk: object) -> bytes:
    """One event. JSON has no raw line break, so it is one line."""
    return b"data: " + encode(chunk) + b"\n\n"


def encode_sse_error(error: Exception) -> bytes:
    """An error as an event, in OpenAI's shape."""
    return encode_sse(build_error_body(error)[1])


def build_json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """A plain answer, without pydantic."""
    return Response(encode(body), media_type="application/json", headers=headers)


async def build_full_response(
    events: GenerationStream, shape: FullFormatter, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The plain answer, once all results are there."""
    try:
        whole = await events.collect()
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # the client is gone
    finally:
        events.close()
    size = sum(len(one.token_ids) for one in whole.choices if one.logprobs is not None)
    size += sum(len(one.prompt_ids) for one in whole.prompts if one.prompt_logprobs is not None)
    body = await run_off_loop(
        lambda: encode(shape.format_full(whole)), size * 16, LONG_OUTPUT_TOKENS
    )
    return Response(body, media_type="application/json", headers=_headers(events, headers))


async def build_response(
    events: GenerationStream,
    shape: StreamOrFullFormatter,
    *,
    headers: Mapping[str, str] | None = None,
    keep_alive_s: float = 0,
) -> Response:
    """The answer as the request wants it: a stream of events, or whole."""
    if events.request.stream:
        return EventStreamResponse(events, shape, headers=headers, keep_alive_s=keep_alive_s)
    return await build_full_response(events, shape, headers=headers)


def _headers(events: GenerationStream, more: Mapping[str, str] | None) -> dict[str, str]:
    keywords = (IgnoredField(name, False) for name in events.plan.ignored_keywords)
    return {**(more or {}), **ignored_fields.ignored_headers([*events.request.ignored, *keywords])}


class EventStreamResponse(Response):
    """A stream of events, closed when it ends, however it ends.

    keep_alive_s: after so long without news a comment is sent; 0: never. on_end: called last.
    """

    def __init__(
        self,
        events: GenerationStream,
        shape: StreamFormatter,
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float = 0,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._generation = events
        self._on_end = on_end
        self._formatter = shape
        self._keep_alive_s = keep_alive_s
        self._chunks = 0  # sent
        self._sending = False
        self._first: asyncio.Task[list[GenerationEvent]] | None = None
        self.status_code = 200
        self.media_type = shape.media_type
        self.background = None
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.init_headers({**own, **_headers(events, headers)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if any(one.request.constraint for one in self._generation.requests):
                await self._await_early_errors()
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async with self._background_tasks(send):
                # A task of its own wakes without passing through every middleware's frame
                last = await asyncio.create_task(self._send_all(send))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            if self._first is not None:
                self._first.cancel()
            self._generation.close()
            self._on_end()

    async def _await_early_errors(self) -> None:
        """Raise what is wrong with the request, if that is found out soon."""
        self._first = asyncio.create_task(self._first_events())
        wait_s = self._generation.early_error_wait_s
        done, _ = await asyncio.wait({self._first}, timeout=wait_s)
        if done:
            self._first.result()

    async def _first_events(self) -> list[GenerationEvent]:
        async for updates in self._generation.stream:  # anext() with a default breaks on 3.11
            return self._generation.process_updates(updates)
        return []

    @property
    def _keep_alive_comment(self) -> bytes:
        """A keep-alive message, where the API has one."""
        return KEEP_ALIVE_COMMENT if self.media_type == "text/event-stream" else b""

    async def _send_all(self, send: Send) -> bytes:
        """Send as it comes; returns what is to be sent last."""
        events, shape = self._generation, self._formatter
        read, write = events.process_updates, shape.format_events
        try:
            if begin := shape.format_start():
                await send({"type": "http.response.body", "body": begin, "more_body": True})
            if self._first is not None and (data := write(await self._first)):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            async for updates in events.stream:
                data = write(read(updates)) if updates else self._keep_alive_comment
                if data:
                    self._sending = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sending = False
                    self._chunks += 1
            events.raise_if_ended()
            return write([events.build_final_event()]) + shape.end
        except ClientDisconnected:
            return b""
        except Exception as error:  # noqa: BLE001 - the border: headers are sent
            return shape.format_error(error) + shape.end

    @asynccontextmanager
    async def _background_tasks(self, send: Send) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._close_when_stalled())]
        if self._keep_alive_s:
            tasks.append(asyncio.create_task(self._send_keep_alives(send)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def _close_when_stalled(self) -> None:
        """A client that holds the connection and reads nothing keeps no engine busy."""
        before = -1
        while not (self._sending and self._chunks == before):
            before = self._chunks
            await asyncio.sleep(STALL_TIMEOUT_S)
        self._generation.client_watch.end_as_disconnected()

    async def _send_keep_alives(self, send: Send) -> None:
        before, silent = -1, 0  # half intervals
        while True:
            silent = silent + 1 if self._chunks == before and not self._sending else 0
            if silent >= 2:
                await send(
                    {"type": "http.response.body", "body": KEEP_ALIVE_COMMENT, "more_body": True}
                )
                silent = 0
            before = self._chunks
            await asyncio.sleep(self._keep_alive_s / 2)
