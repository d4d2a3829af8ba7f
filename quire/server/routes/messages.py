"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API of the same conversations."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.app_state import get_app_state, get_key_owner
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_body, read_json_bytes
from quire.server.formats.messages_formatter import MessagesFormatter
from quire.server.formats.messages_request import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from quire.server.formats.sse import build_json_response, build_response
from quire.server.generation.build_requests import encode_conversation
from quire.server.generation.generation_stream import start_generation
from quire.server.generation.media import load_media
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.generation.plan_answers import plan_answers
from quire.server.generation.request_context import watch_request
from quire.server.generation.validate import require_model, validate_request

router = APIRouter()

BODIES = {
    "/v1/messages": (AnthropicMessagesRequest,),
    "/v1/messages/count_tokens": (AnthropicCountTokensRequest,),
}


@router.post("/v1/messages", tags=["messages"])
async def create_message(http: Request) -> Response:
    """Continue a conversation."""
    state = get_app_state(http)
    body = await read_body(http, AnthropicMessagesRequest, state.options.max_body_bytes)
    events = await start_generation(state, body.to_generation_request(), http, "msg_")
    formatter = MessagesFormatter(events.id, events.model_name)
    headers = {"request-id": events.id} if events.id.isascii() else None
    keep_alive_s = state.options.sse_keep_alive_interval
    return await build_response(events, formatter, headers=headers, keep_alive_s=keep_alive_s)


@router.post("/v1/messages/count_tokens", tags=["messages"])
async def count_tokens(http: Request) -> Response:
    """Count the tokens of a conversation."""
    state = get_app_state(http)
    raw = await read_json_bytes(http, state.options.max_body_bytes)
    request = AnthropicCountTokensRequest.model_validate_json(raw).to_generation_request()
    await require_model(state, get_key_owner(http), request.model)
    validate_request(state, request)
    # Refuses tools as /v1/messages does
    await run_off_loop(lambda: plan_answers(state, request), len(raw), LONG_CHARS)
    with watch_request(state, http, "msg_") as context:
        request = await load_media(state, request, context.key_owner, len(raw))
    # This API has no templates of requests
    ids = await run_off_loop(lambda: encode_conversation(state, request, {}), len(raw), LONG_CHARS)
    return build_json_response(
        {"input_tokens": len(ids)}, ignored_fields.ignored_headers(request.ignored)
    )
