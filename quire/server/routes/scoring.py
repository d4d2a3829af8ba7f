"""POST /score (vLLM) and /rerank (vLLM, Cohere, Jina, Voyage, TEI; all in one)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.app_state import get_app_state
from quire.server.errors import TEI_SCOPE_KEY
from quire.server.formats import pooling_answer
from quire.server.formats.body_reader import read_body
from quire.server.formats.pooling_answer import build_pooling_response
from quire.server.formats.scoring_request import RerankRequest, ScoreRequest
from quire.server.pooling.run_pooling import run_pooling
from quire.server.telemetry.load_header import build_load_header

router = APIRouter()
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
BODIES = {
    **dict.fromkeys(SCORE_PATHS, (ScoreRequest,)),
    **dict.fromkeys(RERANK_PATHS, (RerankRequest,)),
}


@router.post("/score", tags=["scores"])
@router.post("/v1/score", tags=["scores"])
async def create_score(http: Request) -> Response:
    """Score texts against each other: 1 to 1, 1 to N or N to N."""
    state = get_app_state(http)
    body = await read_body(http, ScoreRequest, state.options.max_body_bytes)
    load = await build_load_header(http)
    output = await run_pooling(state, body.pooling_request(), http, "score-")
    return await build_pooling_response(
        output, lambda: pooling_answer.format_scores(state, output), load
    )


@router.post("/rerank", tags=["scores"])
@router.post("/v1/rerank", tags=["scores"])
@router.post("/v2/rerank", tags=["scores"])
async def create_rerank(http: Request) -> Response:
    """Sort documents by their relevance to a query."""
    state = get_app_state(http)
    body = await read_body(http, RerankRequest, state.options.max_body_bytes)
    if body.is_tei:
        http.scope[TEI_SCOPE_KEY] = True
    load = await build_load_header(http)
    output = await run_pooling(state, body.pooling_request(), http, "rerank-")
    return await build_pooling_response(
        output, lambda: pooling_answer.format_reranked(state, output, body), load
    )
