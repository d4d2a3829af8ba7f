"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's words for the same conversations."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server import admit, strict
from quire.server.asked import Asked
from quire.server.body import read, read_bytes
from quire.server.prepare import LONG_CHARS, off_loop, render
from quire.server.protocol.message_events import MessageShape
from quire.server.protocol.messages import CountBody, MessagesBody
from quire.server.services import Services, services
from quire.server.sse import EventStream, answer, json_response
from quire.server.telling import begin

router = APIRouter()

BODIES = {"/v1/messages": (MessagesBody,), "/v1/messages/count_tokens": (CountBody,)}


@router.post("/v1/messages", tags=["messages"])
async def create_message(http: Request) -> Response:
    """Go on with a conversation."""
    to = services(http)
    body = await read(http, MessagesBody, to.options.max_body_bytes)
    events = await begin(to, body.to_asked(), http, "msg_")
    shape = MessageShape(events.id, to.names[0])
    headers = {"request-id": events.id} if events.id.isascii() else None
    if body.stream:
        keep_alive_s = to.options.sse_keep_alive_interval
        return EventStream(events, shape, headers=headers, keep_alive_s=keep_alive_s)
    return await answer(events, shape, headers=headers)


@router.post("/v1/messages/count_tokens", tags=["messages"])
async def count_tokens(http: Request) -> Response:
    """How many tokens a conversation is."""
    to = services(http)
    raw = await read_bytes(http, to.options.max_body_bytes)
    asked = CountBody.model_validate_json(raw).to_asked()
    admit.check(to, asked)
    count = await off_loop(lambda: _count(to, asked), len(raw), LONG_CHARS)
    return json_response({"input_tokens": count}, strict.headers(asked.ignored))


def _count(to: Services, asked: Asked) -> int:
    (one,) = asked.conversations
    text = render(to, asked, {})  # this dialect brings no templates
    return len(to.text().encode(text, add_special_tokens=one.add_special_tokens))
