"""Tokens: POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, context_overflow
from quire.server.app_state import AppState, get_app_state, get_key_owner
from quire.server.formats import ignored_fields
from quire.server.formats.body_reader import read_body, read_json_bytes
from quire.server.formats.sse import build_json_response
from quire.server.formats.tokenize_request import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequestKind,
)
from quire.server.generation.build_requests import encode_conversation
from quire.server.generation.generation_request import GenerationRequest
from quire.server.generation.media import load_media
from quire.server.generation.off_loop import LONG_CHARS, run_off_loop
from quire.server.generation.plan_answers import plan_answers
from quire.server.generation.request_context import watch_request
from quire.server.generation.request_templates import (
    RenderedPrompts,
    render_request_templates,
)
from quire.server.generation.validate import require_model, validate_request

router = APIRouter()
BODIES = {
    "/tokenize": (TokenizeCompletionRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
}

MIN_TOKENS_SHOWN = 1 << 16
"""Tokens that are returned, or made text of, where the context is short."""


@router.post("/tokenize", tags=["tokens"])
async def tokenize(http: Request) -> Response:
    """The tokens of a text or of a conversation."""
    state = get_app_state(http)
    raw = await read_json_bytes(http, state.options.max_body_bytes)
    body = TokenizeRequestKind.model_validate_json(raw).request_type().model_validate_json(raw)
    body.refuse_unsupported_features()
    if isinstance(body, TokenizeChatRequest):
        request = body.to_generation_request()
    else:
        request = GenerationRequest(
            source=body.prompts(), model=body.model, ignored=body.ignored_fields()
        )
    await require_model(state, get_key_owner(http), request.model)
    validate_request(state, request)
    # Refuses tools as the chat route does
    await run_off_loop(lambda: plan_answers(state, request), len(raw), LONG_CHARS)
    with watch_request(state, http, "tokz-") as context:
        request = await load_media(state, request, context.key_owner, len(raw))
        texts = await render_request_templates(state, request, context.key_owner)
    return await run_off_loop(
        lambda: _show_tokens(state, request, body, texts), len(raw), LONG_CHARS
    )


def _show_tokens(
    state: AppState,
    request: GenerationRequest,
    body: TokenizeCompletionRequest | TokenizeChatRequest,
    texts: RenderedPrompts,
) -> Response:
    """Raises TooLong for many times the tokens of a context."""
    ids = _encode(state, request, body, texts)
    most = _max_tokens_shown(state)
    if len(ids) > most:
        problem = f"the text has {len(ids)} tokens, and this route shows at most {most}"
        param = "prompt" if isinstance(body, TokenizeCompletionRequest) else "messages"
        raise context_overflow(state.max_model_len, problem, param=param)
    strings = (
        state.require_tokenizer().convert_ids_to_tokens(ids) if body.return_token_strs else None
    )
    shown = {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return build_json_response(shown, ignored_fields.ignored_headers(request.ignored))


def _max_tokens_shown(state: AppState) -> int:
    return max(MIN_TOKENS_SHOWN, 4 * state.max_model_len)


def _encode(
    state: AppState,
    request: GenerationRequest,
    body: TokenizeCompletionRequest | TokenizeChatRequest,
    texts: RenderedPrompts,
) -> list[int]:
    if isinstance(body, TokenizeCompletionRequest):
        return state.require_tokenizer().encode(
            body.prompt, add_special_tokens=body.add_special_tokens
        )
    return encode_conversation(state, request, texts)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(http: Request) -> Response:
    """The text of tokens."""
    state = get_app_state(http)
    body = await read_body(http, DetokenizeRequest, state.options.max_body_bytes)
    body.refuse_unsupported_features()
    ignored = body.ignored_fields()
    await require_model(state, get_key_owner(http), body.model)
    validate_request(
        state, GenerationRequest(source=body.prompts(), model=body.model, ignored=ignored)
    )
    _check_tokens(state, body.tokens)
    text = await run_off_loop(
        lambda: state.require_tokenizer().decode(body.tokens), len(body.tokens), LONG_CHARS
    )
    return build_json_response({"prompt": text}, ignored_fields.ignored_headers(ignored))


def _check_tokens(state: AppState, tokens: list[int]) -> None:
    most = _max_tokens_shown(state)
    if len(tokens) > most:
        message = f"tokens must hold at most {most} ids, got {len(tokens)}"
        raise RequestError(message, param="tokens")
    size = len(state.require_tokenizer())
    for one in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= one < size:
            raise RequestError(f"tokens must be in [0, {size}), got {one}", param="tokens")


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(http: Request) -> Response:
    """The tokenizer's configuration, with --enable-tokenizer-info-endpoint."""
    state = get_app_state(http)
    if not state.options.enable_tokenizer_info_endpoint:
        raise HTTPException(404, "start the server with --enable-tokenizer-info-endpoint")
    return build_json_response(_tokenizer_config(state))


def _tokenizer_config(state: AppState) -> dict[str, Any]:
    tokenizer = state.require_tokenizer()
    specials = {name: value for name, value in tokenizer.special_tokens_map.items() if value}
    return {
        "tokenizer_class": type(tokenizer.backend).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": state.max_model_len,
        "chat_template": state.chat_template or tokenizer.chat_template,
        **specials,
    }
