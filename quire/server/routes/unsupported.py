"""Routes whose models are not supported yet: 501, with what this server offers instead.

A route leaves this file when it is served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import Unsupported
from quire.server.app_state import get_app_state

router = APIRouter()

_IMAGES = "image models are not supported yet"

UNSUPPORTED_ROUTES = {
    "/v1/audio/speech": "models that speak are not supported yet",
    "/v1/images/generations": _IMAGES,
    "/v1/moderations": "moderation models are not supported yet",
    "/collective_rpc": "functions of the engine's processes cannot be called over HTTP",
    "/update_weights": "taking in other weights while running is not built yet",
    "/inference/v1/generate": "prompts as token ids go to /v1/completions, with return_token_ids",
    "/v1/chat/completions/render": "/tokenize takes messages and shows the tokens of the prompt",
    "/v1/completions/render": "/tokenize shows the tokens of a prompt",
    "/v1/responses/render": "/tokenize takes messages and shows the tokens of the prompt",
    "/v1/chat/completions/derender": "/detokenize makes text of tokens",
    "/v1/completions/derender": "/detokenize makes text of tokens",
}
"""POST path -> what is missing, or what to do instead."""

SERVED_ROUTES = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, "
    "/classify, /score, /rerank, /tokenize, /v1/audio/transcriptions"
)


def _make_refusing_route(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(http: Request) -> Response:
        names = ", ".join(get_app_state(http).served_model_names)
        message = (
            f"{path} is not served: {why}. This server has {SERVED_ROUTES}, with the model {names}"
        )
        raise Unsupported(message)

    route.__doc__ = f"Not served yet: {why}."
    return route


for _path, _why in UNSUPPORTED_ROUTES.items():
    _name = _path.strip("/").replace("/", "_")
    router.add_api_route(
        _path,
        _make_refusing_route(_path, _why),
        methods=["POST"],
        tags=["not served yet"],
        name=_name,
    )
