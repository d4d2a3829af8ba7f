"""What the routes answer, for the OpenAPI document and for nothing else.

The answers themselves are made by hand for speed (`chat.py`, `completions.py` ...). These classes
only say what they look like, so that client generators know it and tests can hold every route to
it: tests/server/test_schemathesis.py compares. A field without a default is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.json_schema import models_json_schema

Json = dict[str, Any]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What went wrong, and which field of the request is to blame."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(_Answer):
    """Every error of every route, except those of /v1/messages."""

    error: ErrorDetail


class MessageErrorDetail(_Answer):
    """As Anthropic's clients read it."""

    type: str
    message: str


class MessageErrorAnswer(_Answer):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: MessageErrorDetail


class PromptTokensDetails(_Answer):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(_Answer):
    """What the generated tokens were."""

    reasoning_tokens: int


class UsageAnswer(_Answer):
    """Tokens of a response; a prompt counts once, whatever n."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(_Answer):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """One entry for each token."""

    content: list[TokenLogprob]


class CompletionLogprobs(_Answer):
    """Lists of one length: an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(_Answer):
    """A token at one place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptSteps = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "abort", "repetition", "tool_calls"]


class FunctionCall(_Answer):
    """Which function with which arguments, as JSON text."""

    name: str | None = None
    arguments: str = ""


class ToolCallAnswer(_Answer):
    """A call that the model asks for."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class ChatMessage(_Answer):
    """What the model said."""

    role: str
    content: str | None
    refusal: str | None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(_Answer):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    x_notes: list[str] | None = None
    token_ids: list[int] | None = None


class _Response(_Answer):
    id: str
    created: int
    model: str
    service_tier: str | None = None
    system_fingerprint: str | None = None
    x_timing: Json | None = None
    metrics: Json | None = None


class ChatAnswer(_Response):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptSteps | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ChatBatchAnswer(_Response):
    """The answer of /v1/chat/completions/batch: a choice for each conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[PromptSteps | None] | PromptSteps | None = None
    prompt_token_ids: list[list[int]] | list[int] | None = None
    prompt_text: list[str] | str | None = None


class ChatDelta(_Answer):
    """What is new."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChunkChoice(_Answer):
    """News of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(_Response):
    """The data of one event of a streamed chat; `data: [DONE]` ends the stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class CompletionChoiceAnswer(_Answer):
    """One of n answers to one of the prompts; or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptSteps | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(_Response):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceAnswer]
    usage: UsageAnswer


class CompletionChunk(_Response):
    """The data of one event of a streamed completion; `data: [DONE]` ends the stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceAnswer]
    usage: UsageAnswer | None = None


class TokenizeAnswer(_Answer):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Answer):
    """The text of tokens."""

    prompt: str


class ModelPermission(_Answer):
    """What may be done with a model."""

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


class ModelCard(_Answer):
    """A name that this server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(_Answer):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(_Answer):
    """Of quire."""

    version: str


class LoadAnswer(_Answer):
    """Requests under way in this process."""

    server_load: int
    queued_requests: int | None = None
    queued_tokens: int | None = None
    predicted_ttft_s: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


class MessageUsage(_Answer):
    """Tokens, as Anthropic counts them: input without what the cache had."""

    model_config = ConfigDict(extra="allow")
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class MessageAnswer(_Answer):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    x_timing: Json | None = None


class CountAnswer(_Answer):
    """Tokens of a prompt."""

    input_tokens: int


class ResponseUsage(_Answer):
    """Tokens, as /v1/responses counts them."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(_Answer):
    """The answer of /v1/responses: what was asked, told back, and what came of it."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: Json | None
    incomplete_details: Json | None
    model: str
    output: list[Json]
    usage: ResponseUsage | None
    store: bool


class GenerateAnswer(_Answer):
    """The answer of /generate: the prompt with each of its answers."""

    text: list[str]


class AbortAnswer(_Answer):
    """How many requests were ended."""

    aborted: int


class ProfileAnswer(_Answer):
    """Where the trace is."""

    path: str


class DeletedResponse(_Answer):
    """A response that is kept no more."""

    id: str
    object: Literal["response"]
    deleted: bool


class CancelledRequest(_Answer):
    """What ran under this id is ended."""

    id: str
    object: Literal["request"]
    cancelled: bool


class SleepingAnswer(_Answer):
    """Whether anything of the engine sleeps."""

    is_sleeping: bool


class PausedAnswer(_Answer):
    """Whether no steps are made."""

    is_paused: bool


class StatusAnswer(_Answer):
    """What was done."""

    status: Literal["paused", "resumed"]


class ServerInfo(_Answer):
    """What runs here."""

    version: str
    model: Json
    server_options: Json
    engine: Json


class InvocationsAnswer(RootModel[ChatAnswer | CompletionAnswer]):
    """As the route answers to which the body belongs."""


class InvocationsChunk(RootModel[ChatChunk | CompletionChunk]):
    """As the route answers to which the body belongs."""


ANSWERS: Mapping[str, type[BaseModel]] = {
    "post /invocations": InvocationsAnswer,
    "post /v1/chat/completions": ChatAnswer,
    "post /v1/completions": CompletionAnswer,
    "post /v1/responses": ResponseAnswer,
    "get /v1/responses/{response_id}": ResponseAnswer,
    "post /v1/responses/{response_id}/cancel": ResponseAnswer,
    "post /v1/messages": MessageAnswer,
    "post /v1/messages/count_tokens": CountAnswer,
    "post /tokenize": TokenizeAnswer,
    "post /detokenize": DetokenizeAnswer,
    "post /generate": GenerateAnswer,
    "get /v1/models": ModelList,
    "get /v1/models/{name}": ModelCard,
    "get /version": VersionAnswer,
    "get /load": LoadAnswer,
    "post /v1/chat/completions/batch": ChatBatchAnswer,
    "delete /v1/responses/{response_id}": DeletedResponse,
    "delete /v1/requests/{request_id}": CancelledRequest,
    "post /abort_requests": AbortAnswer,
    "post /stop_profile": ProfileAnswer,
    "get /is_sleeping": SleepingAnswer,
    "get /is_paused": PausedAnswer,
    "post /pause": StatusAnswer,
    "post /resume": StatusAnswer,
    "get /server_info": ServerInfo,
}
"""Method and path -> the JSON of a good answer. Others have no body that needs words."""

CHUNKS: Mapping[str, type[BaseModel]] = {
    "post /invocations": InvocationsChunk,
    "post /v1/chat/completions": ChatChunk,
    "post /v1/completions": CompletionChunk,
}
"""Routes whose events have one shape."""

STREAMS: Mapping[str, str] = {
    "post /v1/chat/completions": "text/event-stream",
    "post /v1/completions": "text/event-stream",
    "post /v1/responses": "text/event-stream",
    "get /v1/responses/{response_id}": "text/event-stream",
    "post /v1/messages": "text/event-stream",
    "post /invocations": "text/event-stream",
    "post /generate": "application/x-ndjson",
}
"""What they answer if a stream is asked for."""

TEXTS: Mapping[str, str] = {"get /metrics": "text/plain", "get /": "text/html"}

ERRORS: Mapping[str, str] = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No key, or a wrong one.",
    "403": "The route is closed; the message says what opens it.",
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


def describe(document: Json) -> None:
    """Fill in what every operation of an OpenAPI document answers."""
    errors_of: tuple[type[BaseModel], ...] = (ErrorAnswer, MessageErrorAnswer)
    kinds = {*errors_of, *ANSWERS.values(), *CHUNKS.values()}
    refs, made = models_json_schema(
        [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
    for path, methods in document["paths"].items():
        kind = MessageErrorAnswer if path.startswith("/v1/messages") else ErrorAnswer
        errors = {
            status: {"description": text, "content": _json(refs[kind, "validation"])}
            for status, text in ERRORS.items()
        }
        for method, operation in methods.items():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's own; ours are 400
            name = f"{method} {path}"
            answer = ANSWERS.get(name)
            content = {} if answer is None else _json(refs[answer, "validation"])
            if name in STREAMS:
                content[STREAMS[name]] = _events(refs, name)
            if name in TEXTS:
                content = {TEXTS[name]: {"schema": {"type": "string"}}}
            responses["200"].pop("content", None)
            if content:
                responses["200"]["content"] = content
            responses.update(errors)


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _events(refs: Mapping[Any, Json], name: str) -> Json:
    """OpenAPI 3.1 has no words for the items of a stream; x-item says them."""
    chunk = CHUNKS.get(name)
    return {} if chunk is None else {"x-item": refs[chunk, "validation"]}
