"""Response models for the OpenAPI document; no route uses them.

The answers themselves are built by hand for speed (`chat.py`, `completions.py` ...). These classes
describe their shape for client generators, and tests compare every route with them
(tests/server/test_schemathesis.py). A field without a default is always present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.json_schema import models_json_schema

from quire.server.errors import TEI_ROUTES
from quire.server.formats.openapi_pooling_models import (
    POOLING_RESPONSE_MODELS,
    ClassificationResponse,
    EmbeddingResponse,
    JsonDict,
    RerankResponse,
    ResponseModel,
    ScoreResponse,
    TEIRank,
    UsageInfo,
    VoyageRerankResponse,
)


class ErrorInfo(ResponseModel):
    """An error, with the field of the request that caused it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(ResponseModel):
    """Every error of every route, except those of /v1/messages."""

    error: ErrorInfo


class AnthropicError(ResponseModel):
    """As Anthropic's clients read it."""

    type: str
    message: str


class AnthropicErrorResponse(ResponseModel):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicError


class TEIErrorResponse(ResponseModel):
    """An error of the routes of text-embeddings-inference."""

    error: str
    error_type: Literal["Validation", "Overloaded", "Unhealthy", "Backend"]


class RerankErrorResponse(RootModel[ErrorResponse | TEIErrorResponse]):
    """In the form of the API of the body."""


class ChatCompletionLogProb(ResponseModel):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """The token that came."""

    top_logprobs: list[ChatCompletionLogProb]


class ChatCompletionLogProbs(ResponseModel):
    """One entry for each token."""

    content: list[ChatCompletionLogProbsContent]


class CompletionLogProbs(ResponseModel):
    """Lists of one length: an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogProb(ResponseModel):
    """A token at one place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogProbList = list[dict[str, PromptLogProb] | None]
FinishReason = Literal["stop", "length", "abort", "repetition", "tool_calls"]


class ChatFunctionCall(ResponseModel):
    """Which function with which arguments, as JSON text."""

    name: str | None = None
    arguments: str = ""


class ChatToolCall(ResponseModel):
    """A function call in an answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: ChatFunctionCall


class ChatMessage(ResponseModel):
    """The text of the model."""

    role: str
    content: str | None
    refusal: str | None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatCompletionResponseChoice(ResponseModel):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    x_notes: list[str] | None = None
    token_ids: list[int] | None = None


class _GenerationResponse(ResponseModel):
    id: str
    created: int
    model: str
    service_tier: str | None = None
    system_fingerprint: str | None = None
    x_timing: JsonDict | None = None
    metrics: JsonDict | None = None


class ChatCompletionResponse(_GenerationResponse):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogProbList | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class BatchChatCompletionResponse(_GenerationResponse):
    """The answer of /v1/chat/completions/batch: a choice for each conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: list[PromptLogProbList | None] | PromptLogProbList | None = None
    prompt_token_ids: list[list[int]] | list[int] | None = None
    prompt_text: list[str] | str | None = None


class DeltaMessage(ResponseModel):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatCompletionResponseStreamChoice(ResponseModel):
    """News of one of n answers."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(_GenerationResponse):
    """The data of one event of a streamed chat; `data: [DONE]` ends the stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class CompletionResponseChoice(ResponseModel):
    """One of n answers to one of the prompts; or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogProbList | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    token_ids: list[int] | None = None


class CompletionResponse(_GenerationResponse):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseChoice]
    usage: UsageInfo


class CompletionStreamResponse(_GenerationResponse):
    """The data of one event of a streamed completion; `data: [DONE]` ends the stream."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class TokenizeResponse(ResponseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    """The text of tokens."""

    prompt: str


class ModelPermission(ResponseModel):
    """Permissions of a model."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelWeights(ResponseModel):
    """How a model's weights are held in memory."""

    dtype: str
    quantization: str | None
    bits_per_weight: float


class ModelCard(ResponseModel):
    """A name that this server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    weights: ModelWeights
    permission: list[ModelPermission]
    tasks: list[str]
    pooling: JsonDict | None = None


class ModelList(ResponseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(ResponseModel):
    """The version of quire."""

    version: str


class LoadResponse(ResponseModel):
    """Requests under way in this process."""

    server_load: int
    queued_requests: int | None = None
    queued_tokens: int | None = None
    predicted_ttft_s: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


class AnthropicUsage(ResponseModel):
    """Tokens, as Anthropic counts them: input without what the cache had."""

    model_config = ConfigDict(extra="allow")
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class AnthropicMessagesResponse(ResponseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonDict]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    x_timing: JsonDict | None = None


class AnthropicCountTokensResponse(ResponseModel):
    """Tokens of a prompt."""

    input_tokens: int


class ResponseUsage(ResponseModel):
    """Tokens, as /v1/responses counts them."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesResponse(ResponseModel):
    """The answer of /v1/responses: the input, echoed, and the output."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: JsonDict | None
    incomplete_details: JsonDict | None
    model: str
    output: list[JsonDict]
    usage: ResponseUsage | None
    store: bool


class GenerateResponse(ResponseModel):
    """The answer of /generate: the prompt with each of its answers."""

    text: list[str]


class AbortRequestsResponse(ResponseModel):
    """The number of requests that were ended."""

    aborted: int


class ProfileResponse(ResponseModel):
    """The path of each engine's trace."""

    paths: list[str]


class DeletedResponse(ResponseModel):
    """A response that is kept no more."""

    id: str
    object: Literal["response"]
    deleted: bool


class CancelledRequest(ResponseModel):
    """The request with this id was ended."""

    id: str
    object: Literal["request"]
    cancelled: bool


class IsSleepingResponse(ResponseModel):
    """Whether anything of the engine sleeps."""

    is_sleeping: bool


class IsPausedResponse(ResponseModel):
    """Whether no steps are made."""

    is_paused: bool


class PauseResponse(ResponseModel):
    """The state of the engine after the call."""

    status: Literal["paused", "resumed", "draining", "serving"]


class ServerInfoResponse(ResponseModel):
    """The version, model and options of the server."""

    version: str
    model: JsonDict
    server_options: JsonDict
    engines: list[JsonDict]


class InvocationsResponse(
    RootModel[
        ChatCompletionResponse
        | CompletionResponse
        | EmbeddingResponse
        | ClassificationResponse
        | ScoreResponse
        | RerankResponse
        | VoyageRerankResponse
        | list[TEIRank]
    ]
):
    """As the route answers to which the body belongs."""


class InvocationsStreamResponse(RootModel[ChatCompletionStreamResponse | CompletionStreamResponse]):
    """As the route answers to which the body belongs."""


RESPONSE_MODELS: Mapping[str, type[BaseModel]] = {
    "post /invocations": InvocationsResponse,
    "post /v1/chat/completions": ChatCompletionResponse,
    "post /v1/completions": CompletionResponse,
    "post /v1/responses": ResponsesResponse,
    "get /v1/responses/{response_id}": ResponsesResponse,
    "post /v1/responses/{response_id}/cancel": ResponsesResponse,
    "post /v1/messages": AnthropicMessagesResponse,
    "post /v1/messages/count_tokens": AnthropicCountTokensResponse,
    **POOLING_RESPONSE_MODELS,
    "post /tokenize": TokenizeResponse,
    "post /detokenize": DetokenizeResponse,
    "post /generate": GenerateResponse,
    "get /v1/models": ModelList,
    "get /v1/models/{name}": ModelCard,
    "get /version": VersionResponse,
    "get /load": LoadResponse,
    "post /v1/chat/completions/batch": BatchChatCompletionResponse,
    "delete /v1/responses/{response_id}": DeletedResponse,
    "delete /v1/requests/{request_id}": CancelledRequest,
    "post /abort_requests": AbortRequestsResponse,
    "post /stop_profile": ProfileResponse,
    "get /is_sleeping": IsSleepingResponse,
    "get /is_paused": IsPausedResponse,
    "post /pause": PauseResponse,
    "post /resume": PauseResponse,
    "post /drain_engine": PauseResponse,
    "post /undrain_engine": PauseResponse,
    "get /server_info": ServerInfoResponse,
}
"""Method and path -> the JSON of a good answer. Others have no body to describe."""

STREAM_MODELS: Mapping[str, type[BaseModel]] = {
    "post /invocations": InvocationsStreamResponse,
    "post /v1/chat/completions": ChatCompletionStreamResponse,
    "post /v1/completions": CompletionStreamResponse,
}
"""Routes with one shape of events."""

STREAM_MEDIA_TYPES: Mapping[str, str] = {
    "post /v1/chat/completions": "text/event-stream",
    "post /v1/completions": "text/event-stream",
    "post /v1/responses": "text/event-stream",
    "get /v1/responses/{response_id}": "text/event-stream",
    "post /v1/messages": "text/event-stream",
    "post /invocations": "text/event-stream",
    "post /generate": "application/x-ndjson",
}
"""Media type of streamed answers, by route."""

BYTES_ROUTES = frozenset(
    {"post /v1/embeddings", "post /embeddings", "post /pooling", "post /invocations"}
)
"""Routes that answer with raw vectors, if asked to."""

TEXT_MEDIA_TYPES: Mapping[str, str] = {"get /metrics": "text/plain", "get /": "text/html"}

ERROR_DESCRIPTIONS: Mapping[str, str] = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No key, or a wrong one.",
    "403": "The route is closed; the message names the switch that opens it.",
    "404": "No such model, or nothing of that name.",
    "405": "Another method is meant.",
    "408": "The time that the request gave itself is over.",
    "409": "Not in this state.",
    "413": "The body is too large.",
    "429": "Too many requests wait; try again after Retry-After.",
    "500": "The server failed on this request.",
    "501": "Understood, but not built.",
    "503": "The engine is dead, asleep or about to end.",
}


def add_response_schemas(document: JsonDict) -> None:
    """Fill in what every operation of an OpenAPI document answers."""
    errors_of: tuple[type[BaseModel], ...] = (
        *(ErrorResponse, AnthropicErrorResponse),
        *(TEIErrorResponse, RerankErrorResponse),
    )
    kinds = {*errors_of, *RESPONSE_MODELS.values(), *STREAM_MODELS.values()}
    refs, made = models_json_schema(
        [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
    for path, methods in document["paths"].items():
        kind = _error_model(path)
        errors = {
            status: {"description": text, "content": _json_content(refs[kind, "validation"])}
            for status, text in ERROR_DESCRIPTIONS.items()
        }
        for method, operation in methods.items():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own; ours are 400
            name = f"{method} {path}"
            answer = RESPONSE_MODELS.get(name)
            content = {} if answer is None else _json_content(refs[answer, "validation"])
            if name in STREAM_MEDIA_TYPES:
                content[STREAM_MEDIA_TYPES[name]] = _stream_content(refs, name)
            if name in BYTES_ROUTES:
                content["application/octet-stream"] = {}
            if name in TEXT_MEDIA_TYPES:
                content = {TEXT_MEDIA_TYPES[name]: {"schema": {"type": "string"}}}
            responses["200"].pop("content", None)
            if content:
                responses["200"]["content"] = content
            responses.update(errors)


def _error_model(path: str) -> type[BaseModel]:
    if path.startswith("/v1/messages"):
        return AnthropicErrorResponse
    if path in TEI_ROUTES:
        return TEIErrorResponse
    return RerankErrorResponse if "rerank" in path or path == "/invocations" else ErrorResponse


def _json_content(schema: JsonDict) -> JsonDict:
    return {"application/json": {"schema": schema}}


def _stream_content(refs: Mapping[Any, JsonDict], name: str) -> JsonDict:
    """OpenAPI 3.1 cannot describe the items of a stream; x-item does."""
    chunk = STREAM_MODELS.get(name)
    return {} if chunk is None else {"x-item": refs[chunk, "validation"]}
