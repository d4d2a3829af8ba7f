"""POST /v1/embeddings (OpenAI, vLLM, Jina, Voyage) and /v2/embed (Cohere)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.app_state import get_app_state
from quire.server.formats import pooling_answer
from quire.server.formats.body_reader import read_body
from quire.server.formats.embedding_request import CohereEmbedRequest, EmbeddingRequest
from quire.server.formats.pooling_answer import build_pooling_response
from quire.server.pooling.run_pooling import run_pooling
from quire.server.telemetry.load_header import build_load_header

router = APIRouter()
BODIES = {
    "/v1/embeddings": (EmbeddingRequest,),
    "/embeddings": (EmbeddingRequest,),
    "/v2/embed": (CohereEmbedRequest,),
}


@router.post("/embeddings", tags=["embeddings"])
@router.post("/v1/embeddings", tags=["embeddings"])
async def create_embedding(http: Request) -> Response:
    """Embed one or more texts."""
    state = get_app_state(http)
    body = await read_body(http, EmbeddingRequest, state.options.max_body_bytes)
    request, encoding = body.pooling_request(), body.encoding()
    pooling_answer.check_metadata_size(request, encoding)
    load = await build_load_header(http)
    output = await run_pooling(state, request, http, "embd-", (encoding,))
    if encoding.has_body_of_bytes:
        return pooling_answer.build_bytes_response(state, output, encoding)
    return await build_pooling_response(
        output, lambda: pooling_answer.format_embeddings(state, output, encoding), load
    )


@router.post("/v2/embed", tags=["embeddings"])
async def create_cohere_embedding(http: Request) -> Response:
    """Embed one or more texts, as Cohere's API does."""
    state = get_app_state(http)
    body = await read_body(http, CohereEmbedRequest, state.options.max_body_bytes)
    encodings = body.encodings()
    load = await build_load_header(http)
    output = await run_pooling(state, body.pooling_request(), http, "embd-", encodings)
    texts = body.given_texts()
    return await build_pooling_response(
        output, lambda: pooling_answer.format_cohere_embeddings(output, texts, encodings), load
    )
