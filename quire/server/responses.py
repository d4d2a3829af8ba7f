"""POST /v1/responses, and the responses that are kept: show, cancel, delete.

With --enable-responses-store off nothing is kept: `store: true` is answered with `store: false`,
and what needs the store is refused with the name of the switch. A response of the background goes
on after its POST was answered; all others end when their client goes away.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.errors import RequestError
from quire.server.asked import Message
from quire.server.body import read
from quire.server.options import ServerOptions
from quire.server.protocol.response_events import SHOWN, ResponseShape, response_body
from quire.server.protocol.responses import Items, ResponsesBody
from quire.server.response_store import Kept, ResponseStore
from quire.server.services import Services, services, tenant_of
from quire.server.sse import EventStream, answer, json_response
from quire.server.strict import Ignored
from quire.server.telling import Events, begin

SWITCH = "start the server with --enable-responses-store"
NEXT = ("completed", "incomplete")
"""Statuses of responses that another may go on from."""

BODIES = {"/v1/responses": (ResponsesBody,)}


router = APIRouter()


def store_of(options: ServerOptions) -> ResponseStore:
    """A place for responses; one that keeps none unless it is wished for."""
    return ResponseStore(options.responses_store_size if options.enable_responses_store else 0)


@router.post("/v1/responses", tags=["responses"])
async def create_response(http: Request) -> Response:
    """Go on with a conversation that is given as items."""
    to = services(http)
    body = await read(http, ResponsesBody, to.options.max_body_bytes)
    store = _kept_here(http)
    wants = body.store is not False
    if body.background and (store is None or not wants):
        message = "background needs store=true, and a store: " + SWITCH
        raise RequestError(message, param="background")
    earlier = _earlier(http, body.previous_response_id)
    ignored = [Ignored("store", True)] if body.store and store is None else []
    asked = body.to_asked(earlier, ignored=ignored)
    events = await begin(to, asked, http, "resp_", detached=bool(body.background))
    talk = _Talk(to, body, events, earlier, store if wants else None)
    if body.background:
        return talk.in_background()
    if body.stream:
        return EventStream(events, talk.shape, keep_alive_s=to.options.sse_keep_alive_interval)
    response = await answer(events, talk.shape)
    talk.keep()
    return response


class _Talk:
    """One response under way, and its place in the store if it has one."""

    def __init__(
        self,
        to: Services,
        body: ResponsesBody,
        events: Events,
        earlier: list[Message],
        store: ResponseStore | None,
    ) -> None:
        self._to = to
        self._body = body
        self._events = events
        self._earlier = earlier
        self._store = store
        self.shape = ResponseShape(
            _response(to, body, events, store),
            top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            tokens=to.shown(as_ids=False),
            done=self.keep if body.stream and not body.background else None,
        )
        self._kept = Kept(
            self.shape.response,
            keeps_events=bool(body.background and body.stream),
            tenant=events.presence.tenant,
        )

    def in_background(self) -> Response:
        """Answer now, and go on."""
        assert self._store is not None, "there is no background without a store"
        try:
            self._store.add(self._kept)
        except BaseException:
            self._events.close()
            raise
        self._kept.cancel = self._events.close
        self._store.run(asyncio.create_task(self._go_on()))
        if self._body.stream:
            return _replay(self._to, self._kept, 0)
        return Response(self._kept.body, media_type="application/json")

    async def _go_on(self) -> None:
        """Read the generation to its end. Closing it is how it is cancelled."""
        shape, kept = self.shape, self._kept
        shape.open()
        kept.add(shape.take())
        try:
            async for batch in self._events:
                if self._events.closed:
                    break
                kept.add(shape.push(batch))
            if not shape.ended:
                shape.cancel()
        except Exception as error:  # noqa: BLE001 - the border: nobody waits for this task
            shape.fail(error)
        finally:
            self._events.close()
        kept.add(shape.take())
        self._end()
        if self._store is not None:
            self._store.trim()

    def keep(self) -> None:
        """A response of the foreground is kept once it has ended, well or not."""
        if self._store is not None:
            self._end()
            self._store.add(self._kept)

    def _end(self) -> None:
        said = self.shape.response["output"]
        asked = self._body.messages(self._earlier)
        if self._body.instructions is not None:
            asked = asked[1:]  # the next response brings its own
        self._kept.end([*asked, *Items().read(said)] if said else asked)


def _response(
    to: Services, body: ResponsesBody, events: Events, store: ResponseStore | None
) -> dict[str, Any]:
    """The response as it begins: what was asked, and what holds where nothing was said."""
    params = events.prepared[0].params
    return response_body(
        id=events.id if store is None else store.free_id(events.id),
        model=to.names[0],
        stored=store is not None,
        asked=body.model_dump(mode="json", include=set(SHOWN), exclude_none=True),
        used={"temperature": params.temperature, "top_p": params.top_p},
    )


def _kept_here(http: Request) -> ResponseStore | None:
    """Where responses are kept; None if they are not."""
    found = http.app.state.responses
    assert isinstance(found, ResponseStore), found
    return found if found.most else None


def _earlier(http: Request, response_id: str | None) -> list[Message]:
    """The conversation up to the response that this one goes on from."""
    if response_id is None:
        return []
    store = _kept_here(http)
    if store is None:
        message = f"previous_response_id: no response is kept here; {SWITCH}, or send all items"
        raise RequestError(message, param="previous_response_id")
    kept = store.get(response_id, tenant_of(http))
    if kept.status not in NEXT:
        message = f"previous_response_id: that response is {kept.status}, so nothing follows it"
        raise RequestError(message, param="previous_response_id")
    return kept.messages


# -- those that are kept ----------------------------------------------------------------------


@router.get("/v1/responses/{response_id}", tags=["responses"])
async def show_response(
    http: Request, response_id: str, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A response that was kept; or the events of its stream, after the one of that number."""
    kept = _found(http, response_id)
    if stream:
        if not kept.keeps_events:
            message = "only responses that were made with background and stream can be streamed"
            raise RequestError(message, param="stream")
        start = 0 if starting_after is None else starting_after + 1
        return _replay(services(http), kept, max(start, 0))
    if starting_after is not None:
        raise RequestError("starting_after needs stream=true", param="starting_after")
    return Response(kept.body, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", tags=["responses"])
async def cancel_response(http: Request, response_id: str) -> Response:
    """End a response that runs in the background. One that has ended stays as it is."""
    kept = _found(http, response_id)
    if not kept.background:
        message = "only responses that were made with background=true can be cancelled"
        raise RequestError(message, param="response_id")
    if kept.cancel is not None:
        kept.cancel()
        await kept.ended()
    return Response(kept.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", tags=["responses"])
async def delete_response(http: Request, response_id: str) -> Response:
    """Forget a response; what still runs is ended."""
    kept = _found(http, response_id)
    store = _kept_here(http)
    assert store is not None, "it was found in the store"
    store.remove(kept)
    return json_response({"id": kept.id, "object": "response", "deleted": True})


def _found(http: Request, response_id: str) -> Kept:
    store = _kept_here(http)
    if store is None:
        raise HTTPException(404, f"no response is kept here; {SWITCH}")
    return store.get(response_id, tenant_of(http))


def _replay(to: Services, kept: Kept, start: int) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    events = kept.events(start, to.options.sse_keep_alive_interval)
    return StreamingResponse(events, 200, headers, "text/event-stream")
