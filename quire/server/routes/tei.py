"""Routes of text-embeddings-inference (TEI), for its clients. Errors are {error, error_type}.

Its /rerank is in quire.server.routes.scoring; /tokenize is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.config.engine_config import PoolingSection
from quire.errors import RequestError
from quire.server.app_state import VERSION, AppState, get_app_state
from quire.server.formats import pooling_answer
from quire.server.formats.body_reader import read_body
from quire.server.formats.pooling_answer import build_pooling_response
from quire.server.formats.sse import build_json_response
from quire.server.formats.tei_request import (
    TEIEmbedAllRequest,
    TEIEmbedRequest,
    TEIEmbedSparseRequest,
    TEIPredictRequest,
    TEISimilarityRequest,
)
from quire.server.pooling.pooling_request import MAX_INPUTS
from quire.server.pooling.run_pooling import PoolingResults, run_pooling
from quire.server.pooling.validate_pooling import require_pooling

router = APIRouter(tags=["text-embeddings-inference"])
BODIES = {
    "/embed": (TEIEmbedRequest,),
    "/embed_all": (TEIEmbedAllRequest,),
    "/embed_sparse": (TEIEmbedSparseRequest,),
    "/predict": (TEIPredictRequest,),
    "/similarity": (TEISimilarityRequest,),
}


@router.post("/embed")
async def embed(http: Request) -> Response:
    """Embed one or more texts: a list of vectors."""
    return await _answer(http, TEIEmbedRequest, _all_numbers)


@router.post("/embed_all")
async def embed_all(http: Request) -> Response:
    """A vector of each token of one or more texts."""
    return await _answer(http, TEIEmbedAllRequest, _all_numbers)


@router.post("/embed_sparse")
async def embed_sparse(http: Request) -> Response:
    """Weights of tokens of the vocabulary, of a SPLADE model."""
    section = require_pooling(get_app_state(http)).section
    if "splade" not in section.methods:
        message = "this model has no sparse embeddings (SPLADE): /embed and /v1/embeddings serve it"
        raise RequestError(message)
    return await _answer(http, TEIEmbedSparseRequest, pooling_answer.sparse_rows)


@router.post("/predict")
async def predict(http: Request) -> Response:
    """Labels of one or more texts or pairs, the likeliest first."""
    state = get_app_state(http)
    body = await read_body(http, TEIPredictRequest, state.options.max_body_bytes)
    output = await run_pooling(state, body.pooling_request(), http, "predict-")
    found = pooling_answer.predictions(output, require_pooling(state).section.labels)
    return await build_pooling_response(output, lambda: found if body.is_batch else found[0])


@router.post("/similarity")
async def similarity(http: Request) -> Response:
    """Cosines of a sentence and others."""
    return await _answer(http, TEISimilarityRequest, lambda output: output.scores)


@router.get("/info")
async def info(http: Request) -> Response:
    """The model and the limits of this server."""
    return build_json_response(_describe(get_app_state(http)))


async def _answer(
    http: Request, kind: type[Any], build: Callable[[PoolingResults], object]
) -> Response:
    state = get_app_state(http)
    body = await read_body(http, kind, state.options.max_body_bytes)
    output = await run_pooling(state, body.pooling_request(), http, "embd-")
    return await build_pooling_response(output, lambda: build(output))


def _all_numbers(output: PoolingResults) -> list[list[Any]]:
    return [one.tolist() for one in output.vectors]


def _describe(state: AppState) -> dict[str, Any]:
    return {
        "model_id": state.root,
        "model_sha": None,
        "model_dtype": state.dtype,
        "model_type": None if state.pooling is None else _model_type(state.pooling.section),
        "max_concurrent_requests": None,
        "max_input_length": state.max_model_len,
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def _model_type(section: PoolingSection) -> dict[str, Any]:
    if {"embed", "token_embed"}.intersection(section.tasks):
        return {"embedding": {"pooling": "+".join(section.methods)}}
    labels = {str(i): one for i, one in enumerate(section.labels)}
    ids = {one: i for i, one in enumerate(section.labels)}
    kind = "reranker" if section.size == 1 else "classifier"
    return {kind: {"id2label": labels, "label2id": ids}}
