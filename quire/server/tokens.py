"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.body import read, read_bytes
from quire.server.prepare import render
from quire.server.protocol.tokens import (
    DetokenizeBody,
    EitherBody,
    TokenizeBody,
    TokenizeChatBody,
)
from quire.server.services import Services, services
from quire.server.sse import json_response

router = APIRouter()


@router.post("/tokenize", tags=["tokens"])
async def tokenize(http: Request) -> Response:
    """The tokens of a text or of a conversation."""
    to = services(http)
    raw = await read_bytes(http, to.options.max_body_bytes)
    body = EitherBody.model_validate_json(raw).form().model_validate_json(raw)
    ids = _ids(to, body)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": to.max_model_len,
            "tokens": ids,
            "token_strs": to.text().convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }
    )


def _ids(to: Services, body: TokenizeBody | TokenizeChatBody) -> list[int]:
    to.check_model(body.model)
    if isinstance(body, TokenizeChatBody):
        body.check()
        text, special = render(to, body), bool(body.add_special_tokens)
    else:
        body.refuse_later_features()
        text, special = body.prompt, body.add_special_tokens
    return to.text().encode(text, add_special_tokens=special)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(http: Request) -> Response:
    """The text of tokens."""
    to = services(http)
    body = await read(http, DetokenizeBody, to.options.max_body_bytes)
    to.check_model(body.model)
    size = len(to.text())
    for one in body.tokens:
        if not 0 <= one < size:
            raise RequestError(f"tokens must be in [0, {size}), got {one}", param="tokens")
    return json_response({"prompt": to.text().decode(body.tokens)})
