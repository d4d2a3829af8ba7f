"""Plans the answers of a request: tool choice, response format and reasoning budget, decided once.

The plan itself is quire.tool_grammar.answer_plan; this file reads it from a `GenerationRequest` and
refuses what this server cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from quire.core.structured_output_params import translate_error_param
from quire.errors import RequestError, Unsupported
from quire.server.app_state import AppState
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.generation.generation_request import GenerationRequest, StructuredOutputRequest
from quire.text.output.answer_parser import PromptTail, content_only_factory
from quire.text.tools.base import tools_by_name
from quire.tool_grammar.answer_plan import AnswerPlan, ContentConstraint, build_content_constraint
from quire.tool_grammar.call_plan import ToolCallPlan, callable_tools, plan_tool_calls, strict_names
from quire.tool_grammar.prompt_constraints import build_thinking_budget, check_tool_schema
from quire.tool_grammar.tool_choice import ToolChoicePolicy, parse_tool_choice

AUTO_TOOL_CHOICE_FLAGS = "--enable-auto-tool-choice --tool-call-parser NAME"
NO_REASONING_EFFORT = "none"
"""The `reasoning_effort` without reasoning."""


def resolve_thinking_budget(state: AppState, request: GenerationRequest) -> GenerationRequest:
    """Turn a wish for reasoning into a budget of tokens, or into an ignored field.

    It is ignored where the server has no reasoning parser, which counts the tokens.
    """
    wish = request.thinking_budget
    if wish is None and {one.reasoning_effort for one in request.conversations} == {
        NO_REASONING_EFFORT
    }:
        wish = 0
    if wish is None or request.sampling.get("thinking_token_budget") is not None:
        return request
    if state.answer_parsers is not None and state.answer_parsers.reasoning is not None:
        return replace(request, sampling={**request.sampling, "thinking_token_budget": wish})
    if not wish:
        return request
    ignored = [*request.ignored, IgnoredField("thinking.budget_tokens", True)]
    return replace(request, ignored=ignored)


def plan_answers(state: AppState, request: GenerationRequest) -> AnswerPlan:
    """Plan the answers of a validated request. Raises RequestError, Unsupported."""
    tokens = request.sampling.get(
        "thinking_token_budget", state.defaults.get("thinking_token_budget")
    )
    tokens = None if tokens == -1 else tokens
    if tokens is not None:
        build_thinking_budget(0, state.answer_parsers, PromptTail())  # raises if it has no parser
    choice = _resolve_tool_choice(state, request)
    content = _content_constraint(state, request)
    ignored = [
        *_check_schemas(state, request, choice),
        *_name_ignored(state, request.structure, content),
    ]
    calls = _plan_tool_calls(state, request, choice, content)
    parsers = state.answer_parsers
    parses_output = calls.parses_calls
    if parsers is not None and parsers.reasoning is not None:
        parses_output = bool(request.conversations)
    if parses_output and parsers is None:
        parsers = content_only_factory(state.require_tokenizer())
    return AnswerPlan(
        parsers=parsers,
        structured_defaults=state.structured_defaults,
        tool_calls=calls,
        content=content,
        thinking_budget=tokens,
        param="tools" if request.structure is None else request.structure.param,
        names_function=choice.function is not None,
        parses_output=parses_output,
        parallel_tool_calls=request.parallel_tool_calls,
        include_reasoning=request.include_reasoning,
        keep_special_tokens=request.sampling.get("skip_special_tokens") is False,
        ignored_keywords=tuple(dict.fromkeys(ignored)),
    )


def _content_constraint(state: AppState, request: GenerationRequest) -> ContentConstraint:
    """The response format, checked; errors name the client's fields."""
    structure, defaults = request.structure, state.structured_defaults
    if structure is None:
        return ContentConstraint(backend=defaults.backend)
    with translate_error_param(structure.field_names):
        content = build_content_constraint(structure.params, defaults, structure.param)
    if request.prompt_only:
        return ContentConstraint(backend=content.backend)  # no text is generated
    return content


def _name_ignored(
    state: AppState, structure: StructuredOutputRequest | None, content: ContentConstraint
) -> list[str]:
    """Keywords of the response format that are not enforced. Raises RequestError if strict."""
    if structure is None:
        return []
    if structure.strict:
        _refuse_ignored(structure.param, content.ignored_keywords, "strict is true")
    return _ignored_names(state, structure.param, content.ignored_keywords)


def _ignored_names(state: AppState, param: str, keywords: Sequence[str]) -> list[str]:
    if state.options.strict:
        _refuse_ignored(param, keywords, "this server is strict")
    place = param.replace("[", ".").replace("]", "")  # as a header can have it
    names = [f"{place}.{keyword}" for keyword in keywords]
    state.ignored_field_log.log_once(IgnoredField(name, False) for name in names)
    return names


def _refuse_ignored(param: str, keywords: Sequence[str], why: str) -> None:
    if keywords:
        message = f"{param}: {keywords[0]:.64} of the JSON schema cannot be enforced"
        raise RequestError(f"{message}, and {why}: leave it out", param=param)


# -- tools ----------------------------------------------------------------------------------------


def _resolve_tool_choice(state: AppState, request: GenerationRequest) -> ToolChoicePolicy:
    """Which calls the answers may make. Raises RequestError for what this server cannot do."""
    if not request.conversations:
        return ToolChoicePolicy("auto")
    word = request.field_names.get("tool_choice", "tool_choice")
    names = list(tools_by_name(request.tools or ()))
    choice = parse_tool_choice(request.tool_choice, names, word)
    has_parser = state.answer_parsers is not None and state.answer_parsers.tools is not None
    if choice.is_explicit and choice.mode == "auto" and request.tools and not has_parser:
        message = (
            f"{word} 'auto' needs a server with a parser of tool calls (start it with "
            f"{AUTO_TOOL_CHOICE_FLAGS}); leave it out to get calls as text"
        )
        raise RequestError(message, param=word)
    if choice.is_required:
        _check_required(state, request, word)
    return choice


def _check_required(state: AppState, request: GenerationRequest, word: str) -> None:
    if request.beams is not None:
        raise RequestError(f"{word} and use_beam_search exclude each other", param=word)
    if request.sampling.get("detokenize") is False:
        raise RequestError(f"{word} needs text: detokenize must not be false", param="detokenize")
    state.require_tokenizer()


def _check_schemas(
    state: AppState, request: GenerationRequest, choice: ToolChoicePolicy
) -> Iterator[str]:
    """Check each schema that constrains calls: of required ones all, else of strict functions.

    Yields the names of keywords that are not enforced. Raises RequestError.
    """
    tools = request.tools or ()
    strict = strict_names(tools)
    names = strict
    if choice.is_required:
        names = frozenset(tool.name for tool in callable_tools(tools, choice))
    elif (
        choice.mode != "auto" or state.answer_parsers is None or state.answer_parsers.tools is None
    ):
        return
    field = request.field_names.get("parameters", "function.parameters")
    for place, tool in enumerate(tools):
        for name, function in tools_by_name([tool]).items():
            if name in names:
                param = f"tools[{place}].{field}"
                keywords = check_tool_schema(function, param)
                if name in strict:
                    _refuse_ignored(param, keywords, "strict is true")
                yield from _ignored_names(state, param, keywords)


def _plan_tool_calls(
    state: AppState,
    request: GenerationRequest,
    choice: ToolChoicePolicy,
    content: ContentConstraint,
) -> ToolCallPlan:
    """Plan how calls are forced and parsed in the answers."""
    if not request.conversations:
        return ToolCallPlan()
    parsers = state.answer_parsers
    plan = plan_tool_calls(
        None if parsers is None else parsers.tools,
        request.tools or (),
        choice,
        parallel=request.parallel_tool_calls,
        eos_texts=_eos_texts(state) if request.tools else (),
        content=content.grammar,
    )
    drops_calls = request.tools and not request.parallel_tool_calls and choice.mode != "none"
    if drops_calls and not plan.parses_calls:
        message = "parallel_tool_calls=false needs a server that parses tool calls"
        raise Unsupported(f"{message} ({AUTO_TOOL_CHOICE_FLAGS})", param="parallel_tool_calls")
    return plan


def _eos_texts(state: AppState) -> frozenset[str]:
    """Texts of the tokens that end the model's answers."""
    if state.tokenizer is None:
        return frozenset()
    backend = state.tokenizer.backend
    return frozenset(backend.id_to_token(i) or "" for i in state.inputs.eos_ids)
