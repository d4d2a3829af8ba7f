"""Validates requests: the limits and checks of all APIs.

Ranges of sampling fields are checked by SamplingParams, lengths and vocabulary by
quire.text.input_processor; both run later, in quire.server.generation.build_requests. A failed
check raises the narrowest error of quire.errors and names the field as the client does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.params import MAX_SEQUENCES, SamplingParams
from quire.core.types import AdapterRef
from quire.errors import RequestError, UnknownModel, Unsupported, context_overflow
from quire.server.app_state import AppState
from quire.server.auth.api_keys import KeyOwner
from quire.server.formats import ignored_fields
from quire.server.generation.generation_request import (
    MAX_PROMPTS,
    Conversation,
    GenerationRequest,
    RawPrompts,
)
from quire.server.pooling.pooling_request import TASK_ROUTES

MAX_STOPS = 64
"""Stop strings of one request: each is searched for in all new text."""
MAX_BEAMS = 64
MAX_NAMES = 20
"""Names of models in a message."""
ARCHIVE_OVERHEAD_BYTES = 1 << 16
"""Of a tensor's archive, besides its numbers."""
LARGEST_NUMBER_BYTES = 8
"""Of float64."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_CONTENT_REQUIRED_ROLES = ("user", "system", "developer")
"""Roles that need content; an assistant may call tools in its place."""
_TEMPLATE_MARKERS = ("{{", "{%", "{#")
_BEAM_SEARCH_PARAMS = frozenset(
    {
        *("n", "max_tokens", "temperature", "ignore_eos", "skip_special_tokens", "seed"),
        *("include_stop_str_in_output", "allowed_token_ids", "truncate_prompt_tokens"),
        *("skip_reading_prefix_cache", "detokenize", "speculative"),
    }
)


def validate_request(state: AppState, request: GenerationRequest) -> None:
    """Check all that depends neither on the prompt nor on the key, as the model does.

    Raises: RequestError, Unsupported.
    """
    if state.options.strict:
        ignored_fields.refuse_unknown(request.ignored)
    state.ignored_field_log.log_once(request.ignored)
    _check_counts(request)
    source = request.source
    if isinstance(source, RawPrompts):
        for prompt in source.prompts:
            check_chars(state, len(prompt), "prompt")
        check_chars(state, len(source.suffix or ""), "suffix")
        if source.embeds:
            _check_embeds(state, source.embeds)
    else:
        check_chars(state, request.prompt_chars, "messages")
    check_chars(state, len(request.sampling.get("prediction") or ""), "prediction")
    _check_tools(request.tools)
    for conversation in request.conversations:
        _check_conversation(state, conversation)
        _check_words(state, request, conversation)
    _refuse_unsupported(state, request)
    _check_structured_output(state, request)
    _check_stream(request)
    if request.beams is not None:
        _check_beams(request)


def check_generates(state: AppState) -> None:
    """Raise RequestError, with the route that is meant, for a model that generates no text."""
    if state.generates or state.pooling is None:
        return
    tasks = state.pooling.section.tasks
    routes = " and ".join(TASK_ROUTES[one] for one in tasks)
    raise RequestError(f"this model generates no text ({', '.join(tasks)}): use {routes}")


async def require_model(state: AppState, owner: KeyOwner, name: str | None) -> None:
    """Load the adapter that a model name means, if it must be, and check the name.

    Raises: those of check_model(); RequestError for an adapter that cannot be loaded.
    """
    if name is not None and name not in state.served_model_names:
        await state.adapters.resolve(name, owner.tenant)
    check_model(state, owner, name)


def check_model(state: AppState, owner: KeyOwner, name: str | None) -> AdapterRef | None:
    """Return the adapter that a model name means for a key; None: the model itself.

    Raises UnknownModel unless the name is one of the served model or an adapter; None is.
    """
    if name in state.served_model_names or name is None:
        return None
    adapter = state.adapters.find(name, owner.tenant)
    if adapter is not None:
        return adapter
    if not state.options.skip_model_name_validation:
        loaded = (card.name for card in state.adapters.cards(owner.tenant))
        known = ", ".join([*state.served_model_names, *loaded][:MAX_NAMES])
        raise UnknownModel(f"no model {name!r:.100} here; there is {known}", param="model")
    return None


def check_chars(state: AppState, chars: int, param: str) -> None:
    """Raise TooLong for a text that no context holds: tokenizing it takes minutes and gigabytes."""
    most = state.max_prompt_chars
    if chars > most:
        problem = f"{param} has {chars} characters, and this server reads at most {most}"
        raise context_overflow(state.max_model_len, problem, param=param)


def _check_embeds(state: AppState, given: Sequence[str]) -> None:
    """Check that prompts may be embeddings, and their size, before they are decoded."""
    model = state.inputs.require_embeds()
    numbers = model.width * state.max_model_len
    most = ARCHIVE_OVERHEAD_BYTES + numbers * LARGEST_NUMBER_BYTES
    for one in given:
        size = len(one) * 3 // 4
        if size > most:
            problem = (
                f"prompt_embeds has {size} bytes, and {state.max_model_len} embeddings of "
                f"{model.width} numbers have at most {most}"
            )
            raise context_overflow(state.max_model_len, problem, param="prompt_embeds")


def _refuse_unsupported(state: AppState, request: GenerationRequest) -> None:
    _check_output_parsing(state, request)
    if list(request.modalities) != ["text"]:
        raise Unsupported("modalities must be ['text']", param="modalities")
    if request.echo and state.inputs.has_encoder:
        message = "echo: the prompt is read by an encoder, and no part of the answer"
        raise Unsupported(message, param="echo")


def _check_structured_output(state: AppState, request: GenerationRequest) -> None:
    """Refuse a response format together with fields that contradict it."""
    structure = request.structure
    if structure is None:
        return
    if state.tokenizer is None:
        message = (
            f"{structure.field_name}: this server has no tokenizer, and so no text to constrain"
        )
        raise RequestError(message, param=structure.field_name)
    if request.beams is not None:
        message = f"{structure.field_name} and use_beam_search exclude each other: sample instead"
        raise RequestError(message, param=structure.field_name)
    if structure.content_only or request.tool_choice in (None, "none", "auto"):
        return  # forced calls are no content, and agents send both with every request
    choice = request.field_names.get("tool_choice", "tool_choice")
    message = f"{structure.field_name} and {choice} both constrain the answer: give one of them"
    raise RequestError(message, param=structure.field_name)


def _check_output_parsing(state: AppState, request: GenerationRequest) -> None:
    """Reasoning that is left out must first be separated from content."""
    readers = state.answer_parsers
    if request.include_reasoning:
        return
    if readers is None or readers.reasoning is None:
        message = "include_reasoning=false needs a server that separates reasoning from text"
        raise Unsupported(f"{message} (--reasoning-parser)", param="include_reasoning")
    if request.token_ids or request.sampling.get("logprobs") is not None:
        message = "include_reasoning=false: logprobs and token ids would show the reasoning"
        raise RequestError(message, param="include_reasoning")


def _check_conversation(state: AppState, one: Conversation) -> None:
    for place, message in enumerate(one.messages):
        if message.get("content") is None and message.get("role") in _CONTENT_REQUIRED_ROLES:
            problem = (
                f"messages[{place}] has no content: a {message['role']} message must have content"
            )
            raise RequestError(problem, param="messages")
    if one.chat_template is not None and not state.options.trust_request_chat_template:
        problem = "this server does not run chat templates that requests bring"
        raise RequestError(f"{problem} (--trust-request-chat-template)", param="chat_template")
    if one.chat_template is not None and not any(
        mark in one.chat_template for mark in _TEMPLATE_MARKERS
    ):
        # A text without them is the name of a file, where the operator gives it
        problem = "chat_template must be the text of a Jinja template"
        raise RequestError(f"{problem}, got {one.chat_template!r:.80}", param="chat_template")


def _check_words(state: AppState, request: GenerationRequest, one: Conversation) -> None:
    """Roles and efforts are those of OpenAI's API, and those that the chat template names."""
    for place, turn in enumerate(one.messages):
        role = turn.get("role")
        if role not in ROLES and not _template_names(state, request, one, role):
            allowed = f"one of {', '.join(ROLES)}, or a role that the model's chat template names"
            problem = f"messages[{place}].role must be {allowed}, got {role!r:.60}"
            raise RequestError(problem, param="messages")
    effort, known = one.reasoning_effort, (*EFFORTS, *state.options.reasoning_effort_map)
    if effort is None or effort in known or _template_names(state, request, one, effort):
        return
    name = request.field_names.get("reasoning_effort", "reasoning_effort")
    message = f"{name} must be one of {', '.join(dict.fromkeys(known))}, got {effort!r:.60}"
    raise RequestError(message, param=name)


def _template_names(
    state: AppState, request: GenerationRequest, one: Conversation, word: object
) -> bool:
    """Whether the chat template compares something with this word."""
    if not isinstance(word, str) or not word.isidentifier():
        return False
    tokenizer = state.require_tokenizer()
    text = one.chat_template or tokenizer.get_chat_template(state.chat_template, request.tools)
    return f"'{word}'" in text or f'"{word}"' in text


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    if tools is not None and not tools:
        raise RequestError("tools must not be empty; leave it out", param="tools")
    for place, tool in enumerate(tools or ()):
        _check_tool(f"tools[{place}]", tool)


def _check_tool(where: str, tool: Mapping[str, Any]) -> None:
    if tool.get("type") != "function":
        message = f"{where}.type must be 'function', got {tool.get('type')!r:.40}"
        raise RequestError(message, param="tools")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a non-empty string", param="tools")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(parameters, Mapping | None):
        raise RequestError(f"{where}.function.parameters must be a JSON schema", param="tools")


def _check_counts(request: GenerationRequest) -> None:
    source = request.source
    if not isinstance(source, Conversation):
        several = [*source.prompts, *source.embeds] if isinstance(source, RawPrompts) else source
        param = "prompt" if isinstance(source, RawPrompts) else "messages"
        if not several or len(several) > MAX_PROMPTS:
            message = f"{param} must hold 1 to {MAX_PROMPTS} prompts, got {len(several)}"
            raise RequestError(message, param=param)
        most = _max_sequences(request.sampling)
        if len(several) > 1 and len(several) * most > MAX_SEQUENCES:
            raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES}", param="n")
    stops = request.sampling.get("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        name = request.field_names.get("stop", "stop")
        raise RequestError(
            f"{name} must have at most {MAX_STOPS} strings, got {len(stops)}", param=name
        )


def _max_sequences(sampling: Mapping[str, Any]) -> int:
    return max(sampling.get("n") or 1, sampling.get("best_of") or 1)


def _check_stream(request: GenerationRequest) -> None:
    if not request.stream:
        if request.stream_options:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        return
    best_of = request.sampling.get("best_of")
    if best_of is not None and best_of > request.n:
        message = "best_of > n cannot be streamed: the best are known at the end"
        raise RequestError(message, param="best_of")
    if request.sampling.get("prompt_logprobs") is not None and not request.streams_prompt_logprobs:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if not isinstance(request.source, (Conversation, RawPrompts)):
        raise RequestError("several conversations cannot be streamed", param="stream")


def _check_beams(request: GenerationRequest) -> None:
    if request.stream:
        message = "use_beam_search cannot be streamed: the best beams are known at the end"
        raise RequestError(message, param="use_beam_search")
    if request.n > MAX_BEAMS:
        message = f"n must be at most {MAX_BEAMS} with use_beam_search, got {request.n}"
        raise RequestError(message, param="n")
    allowed = request.sampling.get("allowed_token_ids")
    if allowed is not None and len(allowed) < request.n:
        message = f"n ({request.n}) beams need as many allowed_token_ids, got {len(allowed)}"
        raise RequestError(message, param="n")
    if request.timing:
        message = "x_timing is about one request; a beam search is many"
        raise RequestError(message, param="x_timing")
    for name, value in request.sampling.items():
        if name not in _BEAM_SEARCH_PARAMS and value not in (
            getattr(_DEFAULT_PARAMS, name),
            [],
            -1,
        ):
            name = request.field_names.get(name, name)
            message = f"{name} has no effect on a beam search: leave it out, or use_beam_search"
            raise RequestError(message, param=name)


_DEFAULT_PARAMS = SamplingParams()


def to_client_error(error: Exception, request: GenerationRequest) -> Exception:
    """An error of the engine about a request, with the client's names of the fields."""
    if not isinstance(error, RequestError):
        return error
    if error.param is None and (request.structure is not None or request.tools):
        param = "tools" if request.structure is None else request.structure.param
        return type(error)(f"{param}: {error}", param=param)
    return with_client_field_names(error, request.field_names)


def with_client_field_names(error: RequestError, words: Mapping[str, str]) -> RequestError:
    """The error with the client's names of the fields."""
    name = words.get(error.param or "")
    if name is None or error.param is None or name == error.param:
        return error
    message = str(error).replace(error.param, name, 1)
    return type(error)(message, param=name)
