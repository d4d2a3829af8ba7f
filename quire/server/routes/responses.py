"""POST /v1/responses, and stored responses: show, cancel, delete.

With --enable-responses-store off nothing is stored: `store: true` is answered with `store: false`,
and what needs the store is refused with the name of the switch. A background response continues
after its POST was answered; all others end when their client disconnects.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.errors import RequestError
from quire.server.app_state import AppState, get_app_state, get_tenant
from quire.server.formats.body_reader import read_body
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.formats.responses_formatter import (
    ECHOED_FIELDS,
    ResponsesFormatter,
    build_response_body,
)
from quire.server.formats.responses_request import ItemConverter, ResponsesRequest
from quire.server.formats.sse import EventStreamResponse, build_full_response, build_json_response
from quire.server.generation.generation_request import ChatMessageDict
from quire.server.generation.generation_stream import GenerationStream, start_generation
from quire.server.options import ServerOptions
from quire.server.routes.response_store import ResponseStore, StoredResponse

STORE_HINT = "start the server with --enable-responses-store"
CONTINUABLE_STATUSES = ("completed", "incomplete")
"""Statuses of responses that another may continue."""

BODIES = {"/v1/responses": (ResponsesRequest,)}


router = APIRouter()


def build_response_store(options: ServerOptions) -> ResponseStore:
    """A place for responses; one that keeps none unless it is wished for."""
    return ResponseStore(options.responses_store_size if options.enable_responses_store else 0)


@router.post("/v1/responses", tags=["responses"])
async def create_response(http: Request) -> Response:
    """Continue a conversation that is given as items."""
    state = get_app_state(http)
    body = await read_body(http, ResponsesRequest, state.options.max_body_bytes)
    store = _get_response_store(http)
    wants = body.store is not False
    if body.background and (store is None or not wants):
        message = "background needs store=true, and a store: " + STORE_HINT
        raise RequestError(message, param="background")
    earlier = _load_previous_messages(http, body.previous_response_id)
    ignored = [IgnoredField("store", True)] if body.store and store is None else []
    request = body.to_generation_request(earlier, ignored=ignored)
    events = await start_generation(state, request, http, "resp_", detached=bool(body.background))
    run = _ResponseRun(state, body, events, earlier, store if wants else None)
    if body.background:
        return run.in_background()
    if body.stream:
        return EventStreamResponse(
            events, run.formatter, keep_alive_s=state.options.sse_keep_alive_interval
        )
    response = await build_full_response(events, run.formatter)
    run.store_when_done()
    return response


class _ResponseRun:
    """One response under way, and its place in the store if it has one."""

    def __init__(
        self,
        state: AppState,
        body: ResponsesRequest,
        events: GenerationStream,
        earlier: list[ChatMessageDict],
        store: ResponseStore | None,
    ) -> None:
        self._app_state = state
        self._body = body
        self._generation = events
        self._previous_messages = earlier
        self._store = store
        self.formatter = ResponsesFormatter(
            _initial_response(state, body, events, store),
            top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            tokens=state.logprob_formatter(as_ids=False),
            done=self.store_when_done if body.stream and not body.background else None,
        )
        self._stored = StoredResponse(
            self.formatter.response,
            keeps_events=bool(body.background and body.stream),
            tenant=events.client_watch.tenant,
        )

    def in_background(self) -> Response:
        """Answer now, and continue in the background."""
        assert self._store is not None, "there is no background without a store"
        try:
            self._store.add(self._stored)
        except BaseException:
            self._generation.close()
            raise
        self._stored.cancel = self._generation.close
        self._store.run_in_background(asyncio.create_task(self._run_in_background()))
        if self._body.stream:
            return _stream_stored_response(self._app_state, self._stored, 0)
        return Response(self._stored.body_json, media_type="application/json")

    async def _run_in_background(self) -> None:
        """Read the generation to its end. Closing it is how it is cancelled."""
        formatter, kept = self.formatter, self._stored
        formatter.start()
        kept.add_events(formatter.take_chunks())
        try:
            async for batch in self._generation:
                if self._generation.closed:
                    break
                kept.add_events(formatter.add_events(batch))
            if not formatter.is_ended:
                formatter.cancel()
        except Exception as error:  # noqa: BLE001 - no caller awaits this task
            formatter.fail(error)
        finally:
            self._generation.close()
        kept.add_events(formatter.take_chunks())
        self._finish_stored()
        if self._store is not None:
            self._store.evict_excess()

    def store_when_done(self) -> None:
        """A response of the foreground is kept once it has ended, well or not."""
        if self._store is not None:
            self._finish_stored()
            self._store.add(self._stored)

    def _finish_stored(self) -> None:
        output = self.formatter.response["output"]
        request = self._body.build_messages(self._previous_messages)
        if self._body.instructions is not None:
            request = request[1:]  # the next response brings its own
        self._stored.mark_ended([*request, *ItemConverter().convert(output)] if output else request)


def _initial_response(
    state: AppState, body: ResponsesRequest, events: GenerationStream, store: ResponseStore | None
) -> dict[str, Any]:
    """The response as it begins: its input, and defaults for what was not given."""
    params = events.requests[0].params
    return build_response_body(
        id=events.id if store is None else store.make_unique_id(events.id),
        model=events.model_name,
        stored=store is not None,
        asked=body.model_dump(mode="json", include=set(ECHOED_FIELDS), exclude_none=True),
        used={"temperature": params.temperature, "top_p": params.top_p},
    )


def _get_response_store(http: Request) -> ResponseStore | None:
    """The store of responses; None if there is none."""
    found = http.app.state.responses
    assert isinstance(found, ResponseStore), found
    return found if found.max_responses else None


def _load_previous_messages(http: Request, response_id: str | None) -> list[ChatMessageDict]:
    """The conversation up to the response that this one continues."""
    if response_id is None:
        return []
    store = _get_response_store(http)
    if store is None:
        message = f"previous_response_id: no response is kept here; {STORE_HINT}, or send all items"
        raise RequestError(message, param="previous_response_id")
    kept = store.get(response_id, get_tenant(http))
    if kept.status not in CONTINUABLE_STATUSES:
        message = f"previous_response_id: that response is {kept.status}, so nothing follows it"
        raise RequestError(message, param="previous_response_id")
    return kept.conversation


# -- those that are kept ----------------------------------------------------------------------


@router.get("/v1/responses/{response_id}", tags=["responses"])
async def show_response(
    http: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A response that was kept; or the events of its stream, after the one of that number."""
    kept = _get_stored_response(http, response_id)
    if stream:
        if not kept.keeps_events:
            message = "only responses that were made with background and stream can be streamed"
            raise RequestError(message, param="stream")
        start = 0 if starting_after is None else starting_after + 1
        return _stream_stored_response(get_app_state(http), kept, max(start, 0))
    if starting_after is not None:
        raise RequestError("starting_after needs stream=true", param="starting_after")
    return Response(kept.body_json, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", tags=["responses"])
async def cancel_response(http: Request, response_id: str) -> Response:
    """End a response that runs in the background. One that has ended stays as it is."""
    kept = _get_stored_response(http, response_id)
    if not kept.background:
        message = "only responses that were made with background=true can be cancelled"
        raise RequestError(message, param="response_id")
    if kept.cancel is not None:
        kept.cancel()
        await kept.wait_until_ended()
    return Response(kept.body_json, media_type="application/json")


@router.delete("/v1/responses/{response_id}", tags=["responses"])
async def delete_response(http: Request, response_id: str) -> Response:
    """Forget a response; what still runs is ended."""
    kept = _get_stored_response(http, response_id)
    store = _get_response_store(http)
    assert store is not None, "it was found in the store"
    store.remove(kept)
    return build_json_response({"id": kept.id, "object": "response", "deleted": True})


def _get_stored_response(http: Request, response_id: str) -> StoredResponse:
    store = _get_response_store(http)
    if store is None:
        raise HTTPException(404, f"no response is kept here; {STORE_HINT}")
    return store.get(response_id, get_tenant(http))


def _stream_stored_response(state: AppState, kept: StoredResponse, start: int) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    events = kept.events(start, state.options.sse_keep_alive_interval)
    return StreamingResponse(events, 200, headers, "text/event-stream")
