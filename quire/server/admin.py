"""What is served, and how it is: models, version, probes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import quire
from quire.server.services import Services, services
from quire.server.sse import json_response

router = APIRouter()

VERSION = str(quire.__version__)


@router.get("/v1/models", tags=["models"])
async def list_models(http: Request) -> Response:
    """The names this server answers to."""
    to = services(http)
    return json_response({"object": "list", "data": [_card(to, name) for name in to.names]})


@router.get("/v1/models/{name:path}", tags=["models"])
async def show_model(http: Request, name: str) -> Response:
    """One of them."""
    to = services(http)
    to.check_model(name)
    return json_response(_card(to, name))


def _card(to: Services, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": to.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": to.created,
        "owned_by": "quire",
        "root": to.root,
        "parent": None,
        "max_model_len": to.max_model_len,
        "permission": [permission],
    }


@router.get("/version", tags=["health"])
async def version() -> Response:
    """Of quire."""
    return json_response({"version": VERSION})


@router.get("/live", tags=["health"])
async def live() -> Response:
    """200 while this process answers at all."""
    return Response()


@router.get("/health", tags=["health"])
@router.get("/ready", tags=["health"])
async def health(http: Request) -> Response:
    """200 while the engine lives and new requests are welcome, else 503."""
    return Response(status_code=503 if services(http).engine.dead else 200)


@router.get("/ping", tags=["health"])
@router.post("/ping", tags=["health"])
async def ping(http: Request) -> Response:
    """As /health."""
    return await health(http)
