"""Tokens: POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server import strict
from quire.server.admit import check
from quire.server.asked import Asked
from quire.server.body import read, read_bytes
from quire.server.prepare import LONG_CHARS, off_loop, render
from quire.server.protocol.tokens import (
    DetokenizeBody,
    EitherBody,
    TokenizeBody,
    TokenizeChatBody,
)
from quire.server.services import Services, services
from quire.server.sse import json_response
from quire.server.templates import Texts, brought

router = APIRouter()
BODIES = {"/tokenize": (TokenizeBody, TokenizeChatBody), "/detokenize": (DetokenizeBody,)}

MOST_TOKENS = 1 << 16
"""To make text of, where the context is short."""


@router.post("/tokenize", tags=["tokens"])
async def tokenize(http: Request) -> Response:
    """The tokens of a text or of a conversation."""
    to = services(http)
    raw = await read_bytes(http, to.options.max_body_bytes)
    body = EitherBody.model_validate_json(raw).form().model_validate_json(raw)
    body.refuse_later_features()
    if isinstance(body, TokenizeChatBody):
        asked = body.to_asked()
    else:
        asked = Asked(source=body.prompts(), model=body.model, ignored=body.ignored())
    check(to, asked)
    texts = await brought(to, asked)
    ids = await off_loop(lambda: _ids(to, asked, body, texts), len(raw), LONG_CHARS)
    strings = to.text().convert_ids_to_tokens(ids) if body.return_token_strs else None
    shown = {
        "count": len(ids),
        "max_model_len": to.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return json_response(shown, strict.headers(asked.ignored))


def _ids(
    to: Services, asked: Asked, body: TokenizeBody | TokenizeChatBody, texts: Texts
) -> list[int]:
    if isinstance(body, TokenizeBody):
        return to.text().encode(body.prompt, add_special_tokens=body.add_special_tokens)
    (one,) = asked.conversations
    text = render(to, asked, texts)
    return to.text().encode(text, add_special_tokens=one.add_special_tokens)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(http: Request) -> Response:
    """The text of tokens."""
    to = services(http)
    body = await read(http, DetokenizeBody, to.options.max_body_bytes)
    body.refuse_later_features()
    ignored = body.ignored()
    check(to, Asked(source=body.prompts(), model=body.model, ignored=ignored))
    _check_tokens(to, body.tokens)
    text = await off_loop(lambda: to.text().decode(body.tokens), len(body.tokens), LONG_CHARS)
    return json_response({"prompt": text}, strict.headers(ignored))


def _check_tokens(to: Services, tokens: list[int]) -> None:
    most = max(MOST_TOKENS, 4 * to.max_model_len)
    if len(tokens) > most:
        message = f"tokens must hold at most {most} ids, got {len(tokens)}"
        raise RequestError(message, param="tokens")
    size = len(to.text())
    for one in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= one < size:
            raise RequestError(f"tokens must be in [0, {size}), got {one}", param="tokens")


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(http: Request) -> Response:
    """The tokenizer's configuration, with --enable-tokenizer-info-endpoint."""
    to = services(http)
    if not to.options.enable_tokenizer_info_endpoint:
        raise HTTPException(404, "start the server with --enable-tokenizer-info-endpoint")
    return json_response(_info(to))


def _info(to: Services) -> dict[str, Any]:
    tokenizer = to.text()
    specials = {name: value for name, value in tokenizer.special_tokens_map.items() if value}
    return {
        "tokenizer_class": type(tokenizer.backend).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": to.max_model_len,
        "chat_template": to.chat_template or tokenizer.chat_template,
        **specials,
    }
