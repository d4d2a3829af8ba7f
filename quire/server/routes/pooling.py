"""POST /pooling and /classify: any task of a model that pools, and labels of texts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.app_state import get_app_state
from quire.server.formats import pooling_answer
from quire.server.formats.body_reader import read_body
from quire.server.formats.pooling_answer import build_pooling_response
from quire.server.formats.pooling_request_body import ClassifyRequest, PoolingBody
from quire.server.pooling.run_pooling import run_pooling
from quire.server.pooling.validate_pooling import require_pooling
from quire.server.telemetry.load_header import build_load_header

router = APIRouter()
BODIES = {"/pooling": (PoolingBody,), "/classify": (ClassifyRequest,)}


@router.post("/pooling", tags=["embeddings"])
async def create_pooling(http: Request) -> Response:
    """Vectors or labels of texts or of their tokens, by `task`."""
    state = get_app_state(http)
    body = await read_body(http, PoolingBody, state.options.max_body_bytes)
    request, encoding = body.pooling_request(), body.encoding()
    pooling_answer.check_metadata_size(request, encoding)
    load = await build_load_header(http)
    output = await run_pooling(state, request, http, "pool-", (encoding,))
    if encoding.has_body_of_bytes:
        return pooling_answer.build_bytes_response(state, output, encoding)
    return await build_pooling_response(
        output, lambda: pooling_answer.format_pooling(state, output, encoding), load
    )


@router.post("/classify", tags=["scores"])
async def classify(http: Request) -> Response:
    """Labels of texts, with their probabilities."""
    state = get_app_state(http)
    body = await read_body(http, ClassifyRequest, state.options.max_body_bytes)
    load = await build_load_header(http)
    output = await run_pooling(state, body.pooling_request(), http, "classify-")
    labels = require_pooling(state).section.labels
    return await build_pooling_response(
        output, lambda: pooling_answer.format_classes(state, output, labels), load
    )
