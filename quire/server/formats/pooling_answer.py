"""Answers of the pooling routes, in the form of each API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from quire.errors import RequestError
from quire.server.app_state import AppState
from quire.server.formats import ignored_fields
from quire.server.formats.scoring_request import RerankRequest, ScoreItem
from quire.server.formats.sse import encode
from quire.server.formats.vector_encoding import VectorEncoding
from quire.server.generation.off_loop import run_off_loop
from quire.server.pooling.pooling_request import PoolingRequest
from quire.server.pooling.run_pooling import PoolingResults

LONG_ANSWER_NUMBERS = 50_000
"""Numbers beyond which an answer is put together in another thread."""
MAX_METADATA_BYTES = 60_000
"""Of a header: clients read no longer ones."""
DOCUMENTS_PER_SEARCH_UNIT = 100
"""As Cohere bills them."""


async def build_pooling_response(
    output: PoolingResults, build: Callable[[], object], headers: Mapping[str, str] | None = None
) -> Response:
    """The JSON answer. build: makes its body, in another thread if that takes long."""
    size = sum(one.size for one in output.vectors) + len(output.scores)
    data = await run_off_loop(lambda: encode(build()), size, LONG_ANSWER_NUMBERS)
    found = {**(headers or {}), **ignored_fields.ignored_headers(output.ignored)}
    return Response(data, media_type="application/json", headers=found)


def format_list(
    state: AppState, output: PoolingResults, items: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """OpenAI's list of items."""
    body = {
        "id": output.id,
        "object": "list",
        "created": output.created,
        "model": output.model,
        "data": items,
        "usage": format_usage(state, output),
    }
    return with_timing(body, output)


def with_timing(body: dict[str, object], output: PoolingResults) -> dict[str, object]:
    """The body, with the times that the request has switched on."""
    if output.timing is not None:
        body["x_timing"] = output.timing
    return body


def format_usage(state: AppState, output: PoolingResults) -> dict[str, object]:
    """Tokens as OpenAI's embeddings count them."""
    usage: dict[str, object] = {
        "prompt_tokens": output.prompt_tokens,
        "total_tokens": output.prompt_tokens,
    }
    if state.options.enable_prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": output.cached_tokens}
    return usage


# -- vectors ----------------------------------------------------------------------------------


def format_embeddings(
    state: AppState, output: PoolingResults, encoding: VectorEncoding
) -> dict[str, object]:
    """The answer of /v1/embeddings."""
    items = [
        {"index": i, "object": "embedding", "embedding": encoding.to_json(one)}
        for i, one in enumerate(output.vectors)
    ]
    return format_list(state, output, items)


def format_pooling(
    state: AppState, output: PoolingResults, encoding: VectorEncoding
) -> dict[str, object]:
    """The answer of /pooling: a vector of each input, or a list of vectors of its tokens."""
    items = [
        {"index": i, "object": "pooling", "data": encoding.to_json(one)}
        for i, one in enumerate(output.vectors)
    ]
    return format_list(state, output, items)


def build_bytes_response(
    state: AppState, output: PoolingResults, encoding: VectorEncoding
) -> Response:
    """All vectors one after another; the header `metadata` has the place of each."""
    parts = [encoding.to_bytes(one) for one in output.vectors]
    headers = ignored_fields.ignored_headers(output.ignored)
    if encoding.format == "bytes":
        described, start = [], 0
        for place, (part, vector) in enumerate(zip(parts, output.vectors)):
            described.append(_describe_part(place, encoding, start, len(part), vector.shape))
            start += len(part)
        headers["metadata"] = encode(format_list(state, output, described)).decode()
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def check_metadata_size(request: PoolingRequest, encoding: VectorEncoding) -> None:
    """Raise RequestError if the header of an answer of bytes would be too long."""
    items = len(request.source)
    one = len(encode(_describe_part(9999, encoding, 10**9, 10**9, (99999, 9999))))
    most = MAX_METADATA_BYTES // one
    if encoding.format == "bytes" and items > most:
        message = f"encoding_format bytes describes at most {most} vectors in a header, got {items}"
        raise RequestError(f"{message}: send bytes_only, or fewer", param="encoding_format")


def _describe_part(
    place: int, encoding: VectorEncoding, start: int, size: int, shape: tuple[int, ...]
) -> dict[str, object]:
    return {
        "index": place,
        "embed_dtype": encoding.dtype,
        "endianness": encoding.endianness,
        "start": start,
        "end": start + size,
        "shape": shape,
    }


def format_cohere_embeddings(
    output: PoolingResults, texts: Sequence[str], encodings: Sequence[VectorEncoding]
) -> dict[str, object]:
    """The answer of /v2/embed."""
    body: dict[str, object] = {
        "id": output.id,
        "embeddings": {
            one.format: [one.to_json(vector) for vector in output.vectors] for one in encodings
        },
        "texts": texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": output.prompt_tokens},
        },
        "response_type": "embeddings_by_type",
    }
    return with_timing(body, output)


def sparse_rows(output: PoolingResults) -> list[list[dict[str, object]]]:
    """Of each vector the numbers that are not 0."""
    return [
        [{"index": i, "value": value} for i, value in enumerate(one.tolist()) if value]
        for one in output.vectors
    ]


# -- labels -----------------------------------------------------------------------------------


def format_classes(
    state: AppState, output: PoolingResults, labels: Sequence[str]
) -> dict[str, object]:
    """The answer of /classify."""
    items = []
    for place, one in enumerate(output.vectors):
        probs = one.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        label = labels[best] if best < len(labels) else None
        items.append({"index": place, "label": label, "probs": probs, "num_classes": len(probs)})
    return format_list(state, output, items)


def predictions(output: PoolingResults, labels: Sequence[str]) -> list[list[dict[str, object]]]:
    """TEI's: of each input all labels, the likeliest first."""
    found = []
    for one in output.vectors:
        ranked = sorted(enumerate(one.tolist()), key=lambda entry: -entry[1])
        found.append([{"score": score, "label": _label(labels, i)} for i, score in ranked])
    return found


def _label(labels: Sequence[str], index: int) -> str:
    return labels[index] if index < len(labels) else f"LABEL_{index}"


# -- scores -----------------------------------------------------------------------------------


def format_scores(state: AppState, output: PoolingResults) -> dict[str, object]:
    """The answer of /score."""
    items = [
        {"index": i, "object": "score", "score": score} for i, score in enumerate(output.scores)
    ]
    return format_list(state, output, items)


def format_reranked(state: AppState, output: PoolingResults, body: RerankRequest) -> object:
    """The answer of /rerank in the API of the body: TEI's, Voyage's, or one for all others."""
    scores = output.scores
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.count()]
    documents = body.given_documents
    if body.is_tei:
        return [
            {"index": i, "score": scores[i], **({"text": documents[i]} if body.return_text else {})}
            for i in ranked
        ]
    if body.is_voyage:
        shown = bool(body.return_documents)
        items = [
            {
                "object": "reranking",
                "relevance_score": scores[i],
                "index": i,
                **({"document": documents[i]} if shown else {}),
            }
            for i in ranked
        ]
        return format_list(state, output, items)
    results = [_rerank_result(i, scores[i], documents[i], body) for i in ranked]
    units = math.ceil(len(documents) / DOCUMENTS_PER_SEARCH_UNIT)
    answer: dict[str, object] = {
        "id": output.id,
        "model": output.model,
        "usage": format_usage(state, output),
        "results": results,
        "meta": {"billed_units": {"search_units": units}},
    }
    return with_timing(answer, output)


def _rerank_result(
    place: int, score: float, document: ScoreItem, body: RerankRequest
) -> dict[str, Any]:
    result: dict[str, Any] = {"index": place, "relevance_score": score}
    if body.return_documents is not False:
        if isinstance(document, str):
            document = {"text": document}
        elif "text" not in document and "content" in document:
            document = {"text": None, "multi_modal": document["content"]}
        result["document"] = document
    return result
