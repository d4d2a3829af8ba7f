"""Response models of the pooling routes for the OpenAPI document, and what all models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

JsonDict = dict[str, Any]


class ResponseModel(BaseModel):
    """No other fields than those that are named."""

    model_config = ConfigDict(extra="forbid")


class PromptTokenUsageInfo(ResponseModel):
    """Counts of prompt tokens by where they came from."""

    cached_tokens: int


class CompletionTokenUsageInfo(ResponseModel):
    """Counts of generated tokens by kind."""

    reasoning_tokens: int


class UsageInfo(ResponseModel):
    """Tokens of a response; a prompt counts once, whatever n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenUsageInfo | None = None
    completion_tokens_details: CompletionTokenUsageInfo | None = None


class PoolingUsage(ResponseModel):
    """Tokens of inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenUsageInfo | None = None


class _PoolingListResponse(ResponseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage
    x_timing: JsonDict | None = None


class EmbeddingItem(ResponseModel):
    """A vector: numbers, or base64."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(_PoolingListResponse):
    """The answer of /v1/embeddings."""

    data: list[EmbeddingItem]


class PoolingItem(ResponseModel):
    """A vector, vectors of tokens, or base64 of either."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(_PoolingListResponse):
    """The answer of /pooling."""

    data: list[PoolingItem]


class ClassificationItem(ResponseModel):
    """The likeliest label, and the probabilities of all."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(_PoolingListResponse):
    """The answer of /classify."""

    data: list[ClassificationItem]


class ScoreItemResponse(ResponseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(_PoolingListResponse):
    """The answer of /score."""

    data: list[ScoreItemResponse]


class GenerativeScoreResponse(ResponseModel):
    """The answer of /generative_scoring."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItemResponse]
    usage: UsageInfo


class RerankResult(ResponseModel):
    """A document and its score."""

    index: int
    relevance_score: float
    document: JsonDict | None = None


class RerankMeta(ResponseModel):
    """As Cohere bills."""

    billed_units: dict[str, int]


class RerankResponse(ResponseModel):
    """The answer of /rerank, the best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
    meta: RerankMeta
    x_timing: JsonDict | None = None


class VoyageResult(ResponseModel):
    """A document and its score, as Voyage writes it."""

    object: Literal["reranking"]
    index: int
    relevance_score: float
    document: str | JsonDict | None = None


class VoyageRerankResponse(_PoolingListResponse):
    """The answer of /rerank to Voyage's clients."""

    data: list[VoyageResult]


class TEIRank(ResponseModel):
    """A text and its score, as TEI writes it."""

    index: int
    score: float
    text: str | JsonDict | None = None


class AnyRerankResponse(RootModel[RerankResponse | VoyageRerankResponse | list[TEIRank]]):
    """In the form of the API of the body."""


class CohereMeta(ResponseModel):
    """As Cohere bills."""

    api_version: dict[str, str]
    billed_units: dict[str, int]


class CohereEmbedResponse(ResponseModel):
    """The answer of /v2/embed."""

    id: str
    embeddings: dict[str, list[list[float] | list[int] | str]]
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]
    x_timing: JsonDict | None = None


class TEIVectors(RootModel[list[list[float]]]):
    """A vector of each input."""


class TEITokenVectors(RootModel[list[list[list[float]]]]):
    """A vector of each token of each input."""


class TEISparseValue(ResponseModel):
    """The weight of a token of the vocabulary."""

    index: int
    value: float


class TEISparseVectors(RootModel[list[list[TEISparseValue]]]):
    """Weights of each input."""


class TEIPrediction(ResponseModel):
    """A label and its score."""

    score: float
    label: str


class TEIPredictions(RootModel[list[TEIPrediction] | list[list[TEIPrediction]]]):
    """Labels of one input or of each, the likeliest first."""


class TEISimilarities(RootModel[list[float]]):
    """Of each sentence."""


class TEIInfo(ResponseModel):
    """The model and the limits of this server."""

    model_config = ConfigDict(extra="allow")
    model_id: str
    max_input_length: int
    max_client_batch_size: int
    version: str


POOLING_RESPONSE_MODELS: Mapping[str, type[BaseModel]] = {
    **dict.fromkeys(("post /v1/embeddings", "post /embeddings"), EmbeddingResponse),
    "post /v2/embed": CohereEmbedResponse,
    "post /pooling": PoolingResponse,
    "post /classify": ClassificationResponse,
    **dict.fromkeys(("post /score", "post /v1/score"), ScoreResponse),
    **dict.fromkeys(("post /rerank", "post /v1/rerank", "post /v2/rerank"), AnyRerankResponse),
    "post /generative_scoring": GenerativeScoreResponse,
    "post /embed": TEIVectors,
    "post /embed_all": TEITokenVectors,
    "post /embed_sparse": TEISparseVectors,
    "post /predict": TEIPredictions,
    "post /similarity": TEISimilarities,
    "get /info": TEIInfo,
}
"""Method and path -> the JSON of a good answer."""
