"""May it be done? The limits and checks of every dialect, in this one place.

Not here: ranges of single sampling fields (SamplingParams), what needs a vocabulary or lengths
(quire.text.input_processor); both run in quire.server.generation.build_requests, for what was let
in here. A check that fails
raises the narrowest error of quire.errors and names the field by the client's own word for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.core.params import INT64, MAX_SEQUENCES, SamplingParams
from quire.errors import RequestError, Unsupported
from quire.server.app_state import AppState
from quire.server.formats import ignored_fields
from quire.server.generation import tool_choice
from quire.server.generation.generation_request import (
    MAX_PROMPTS,
    Conversation,
    GenerationRequest,
    RawPrompts,
)

MAX_STOPS = 64
"""Stop strings of one request: each is searched for in all new text."""
MAX_BEAMS = 64
MAX_TIMEOUT_S = 24 * 3600.0

TIMEOUT_HEADER = "x-request-timeout"
PRIORITY_HEADER = "x-vllm-priority"

_CONTENT_REQUIRED_ROLES = ("user", "system", "developer")
"""Roles whose messages are nothing without content; an assistant may call tools in its place."""
_TEMPLATE_MARKERS = ("{{", "{%", "{#")
_BEAM_SEARCH_PARAMS = frozenset(
    {
        *("n", "max_tokens", "temperature", "ignore_eos", "skip_special_tokens", "seed"),
        *("include_stop_str_in_output", "allowed_token_ids", "truncate_prompt_tokens"),
        *("skip_reading_prefix_cache", "detokenize"),
    }
)


def validate_request(to: AppState, asked: GenerationRequest) -> None:
    """Raise for what is wrong whatever the prompt: UnknownModel, RequestError, Unsupported."""
    to.check_model(asked.model)
    if to.options.strict:
        ignored_fields.refuse_unknown(asked.ignored)
    to.ignored_field_log.log_once(asked.ignored)
    _check_counts(asked)
    source = asked.source
    if isinstance(source, RawPrompts):
        for prompt in source.prompts:
            to.check_chars(len(prompt), "prompt")
    else:
        to.check_chars(asked.prompt_chars, "messages")
    for conversation in asked.conversations:
        _check_conversation(to, conversation)
    _refuse_unsupported(to, asked)
    _check_structured_output(to, asked)
    _check_stream(asked)
    if asked.beams is not None:
        _check_beams(asked)


def parse_deadline_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the client gives, in its header X-Request-Timeout."""
    said = headers.get(TIMEOUT_HEADER)
    if said is None:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"X-Request-Timeout must be seconds in (0, {MAX_TIMEOUT_S:g}], got {said!r:.40}"
        raise RequestError(message, param="X-Request-Timeout")
    return seconds


def resolve_priority(to: AppState, asked: GenerationRequest, headers: Mapping[str, str]) -> int:
    """Of the header X-Vllm-Priority, or of the body."""
    wanted, param = asked.priority or 0, "priority"
    said = headers.get(PRIORITY_HEADER)
    if said is not None:
        param = "X-Vllm-Priority"
        if not (said.isascii() and said.removeprefix("-").isdecimal() and len(said) <= 20):
            raise RequestError(f"{param} must be an integer, got {said!r:.40}", param=param)
        wanted = int(said)
    if wanted not in INT64:
        raise RequestError(f"{param} must be a 64-bit integer, got {wanted}", param=param)
    if wanted and not to.has_priority_scheduling:
        message = f"priority {wanted} needs a server with --scheduling-policy priority"
        raise RequestError(message, param=param)
    return wanted


def _refuse_unsupported(to: AppState, asked: GenerationRequest) -> None:
    tool_choice.check_tool_choice(to, asked)
    _check_output_parsing(to, asked)
    if list(asked.modalities) != ["text"]:
        raise Unsupported("modalities must be ['text']", param="modalities")


def _check_structured_output(to: AppState, asked: GenerationRequest) -> None:
    """A form with what would go against it."""
    structure = asked.structure
    if structure is None:
        return
    if to.tokenizer is None:
        message = (
            f"{structure.field_name}: this server has no tokenizer, and so no text to give a form"
        )
        raise RequestError(message, param=structure.field_name)
    if asked.beams is not None:
        message = f"{structure.field_name} and use_beam_search exclude each other: sample instead"
        raise RequestError(message, param=structure.field_name)
    if structure.content_only or asked.tool_choice in (None, "none", "auto"):
        return  # forced calls are no content, and agents send both with every request
    choice = asked.field_names.get("tool_choice", "tool_choice")
    message = f"{structure.field_name} and {choice} both say what the answer is: give one of them"
    raise RequestError(message, param=structure.field_name)


def _check_output_parsing(to: AppState, asked: GenerationRequest) -> None:
    """What is to be left out must first be told from the rest."""
    tool_choice.refuse_parsing_without_parser(to, asked)
    readers = to.answer_parsers
    if asked.include_reasoning:
        return
    if readers is None or readers.reasoning is None:
        message = "include_reasoning=false needs a server that tells reasoning from text"
        raise Unsupported(f"{message} (--reasoning-parser)", param="include_reasoning")
    if asked.token_ids or asked.sampling.get("logprobs") is not None:
        message = "include_reasoning=false: logprobs and token ids would show the reasoning"
        raise RequestError(message, param="include_reasoning")


def _check_conversation(to: AppState, one: Conversation) -> None:
    if one.tools is not None and not one.tools:
        raise RequestError("tools must not be empty; leave it out", param="tools")
    for place, tool in enumerate(one.tools or ()):
        _check_tool(f"tools[{place}]", tool)
    for place, message in enumerate(one.messages):
        if message.get("content") is None and message.get("role") in _CONTENT_REQUIRED_ROLES:
            told = f"messages[{place}] has no content: a {message['role']} must say something"
            raise RequestError(told, param="messages")
    if one.chat_template is not None and not to.options.trust_request_chat_template:
        told = "this server does not run chat templates that requests bring"
        raise RequestError(f"{told} (--trust-request-chat-template)", param="chat_template")
    if one.chat_template is not None and not any(
        mark in one.chat_template for mark in _TEMPLATE_MARKERS
    ):
        # A text without them is the name of a file to whom the operator gives it
        told = "chat_template must be the text of a Jinja template"
        raise RequestError(f"{told}, got {one.chat_template!r:.80}", param="chat_template")


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


def _check_counts(asked: GenerationRequest) -> None:
    source = asked.source
    if not isinstance(source, Conversation):
        several = source.prompts if isinstance(source, RawPrompts) else source
        param = "prompt" if isinstance(source, RawPrompts) else "messages"
        if not several or len(several) > MAX_PROMPTS:
            message = f"{param} must hold 1 to {MAX_PROMPTS} prompts, got {len(several)}"
            raise RequestError(message, param=param)
        most = _max_sequences(asked.sampling)
        if len(several) > 1 and len(several) * most > MAX_SEQUENCES:
            raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES}", param="n")
    stops = asked.sampling.get("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        word = asked.field_names.get("stop", "stop")
        raise RequestError(
            f"{word} must have at most {MAX_STOPS} strings, got {len(stops)}", param=word
        )


def _max_sequences(sampling: Mapping[str, Any]) -> int:
    return max(sampling.get("n") or 1, sampling.get("best_of") or 1)


def _check_stream(asked: GenerationRequest) -> None:
    if not asked.stream:
        if asked.stream_options:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        return
    best_of = asked.sampling.get("best_of")
    if best_of is not None and best_of > asked.n:
        message = "best_of > n cannot be streamed: the best are known at the end"
        raise RequestError(message, param="best_of")
    if asked.sampling.get("prompt_logprobs") is not None and not asked.streams_prompt_logprobs:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if not isinstance(asked.source, (Conversation, RawPrompts)):
        raise RequestError("several conversations cannot be streamed", param="stream")


def _check_beams(asked: GenerationRequest) -> None:
    if asked.stream:
        message = "use_beam_search cannot be streamed: the best beams are known at the end"
        raise RequestError(message, param="use_beam_search")
    if asked.n > MAX_BEAMS:
        message = f"n must be at most {MAX_BEAMS} with use_beam_search, got {asked.n}"
        raise RequestError(message, param="n")
    allowed = asked.sampling.get("allowed_token_ids")
    if allowed is not None and len(allowed) < asked.n:
        message = f"n ({asked.n}) beams need as many allowed_token_ids, got {len(allowed)}"
        raise RequestError(message, param="n")
    if asked.timing:
        message = "x_timing tells of one request; a beam search is many"
        raise RequestError(message, param="x_timing")
    for name, value in asked.sampling.items():
        if name not in _BEAM_SEARCH_PARAMS and value not in (
            getattr(_DEFAULT_PARAMS, name),
            [],
            -1,
        ):
            word = asked.field_names.get(name, name)
            message = f"{word} means nothing to a beam search: leave it out, or use_beam_search"
            raise RequestError(message, param=word)


_DEFAULT_PARAMS = SamplingParams()


def to_client_error(error: Exception, asked: GenerationRequest) -> Exception:
    """A fault that the engine found in a request, in the client's words."""
    if not isinstance(error, RequestError):
        return error
    if error.param is None and asked.structure is not None:
        return type(error)(f"{asked.structure.param}: {error}", param=asked.structure.param)
    return with_client_field_names(error, asked.field_names)


def with_client_field_names(error: RequestError, words: Mapping[str, str]) -> RequestError:
    """The error in the words of the dialect."""
    word = words.get(error.param or "")
    if word is None or error.param is None or word == error.param:
        return error
    message = str(error).replace(error.param, word, 1)
    return type(error)(message, param=word)
