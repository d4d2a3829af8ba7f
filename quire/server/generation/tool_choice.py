"""What a request's tools and thoughts mean for its answers: forms, readers, budgets.

    check()      before anything runs: may it be asked for, and can it be kept?
    form()       of a whole answer: calls, and all of it behind reasoning
    plan_of()    the same decision, for who reads the answer
    rules()      of a prompt: its form as a constraint, and how long its answers may think

Not here: forms (quire.tool_grammar), what response_format says
(quire.server.generation.response_format).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.core.params import SamplingParams
from quire.errors import RequestError, Unsupported
from quire.grammar.frontends import validate
from quire.grammar.grammar_ast import GrammarNode
from quire.server.formats.ignored_fields import IgnoredField
from quire.server.generation.generation_request import Conversation, GenerationRequest
from quire.text.output.answer_parser import (
    AnswerParserFactory,
    PromptTail,
    content_only_factory,
    message_text,
)
from quire.text.tools.base import tools_by_name
from quire.tool_grammar.after_reasoning import AnswerGrammar
from quire.tool_grammar.call_plan import ToolCallPlan, callable_tools, plan_tool_calls, strict_names
from quire.tool_grammar.prompt_constraints import (
    PromptConstraints,
    answer_grammar,
    build_thinking_budget,
    check_tool_schema,
)
from quire.tool_grammar.tool_choice import ToolChoicePolicy, parse_tool_choice

if TYPE_CHECKING:
    from quire.server.app_state import AppState
    from quire.server.generation.response_format import ContentConstraint as BoundContent

AUTO_TOOL_CHOICE_FLAGS = "--enable-auto-tool-choice --tool-call-parser NAME"
NO_REASONING_EFFORT = "none"
"""The effort that is none at all."""


def resolve_tool_choice(asked: GenerationRequest, one: Conversation) -> ToolChoicePolicy:
    """Which calls an answer may make. Raises RequestError."""
    word = asked.field_names.get("tool_choice", "tool_choice")
    return parse_tool_choice(asked.tool_choice, list(tools_by_name(one.tools or ())), word)


def build_tool_call_plan(
    to: AppState, asked: GenerationRequest, one: Conversation, content: GrammarNode | None = None
) -> ToolCallPlan:
    """How calls are written and read in the answers to a conversation."""
    if not one.tools:
        return ToolCallPlan(None if content is None else AnswerGrammar(content))
    chosen = to.answer_parsers.tools if to.answer_parsers is not None else None
    return plan_tool_calls(
        chosen,
        one.tools,
        resolve_tool_choice(asked, one),
        parallel=asked.parallel_tool_calls,
        ends=_eos_texts(to, asked),
        content=content,
    )


def build_chat_constraints(
    to: AppState,
    asked: GenerationRequest,
    one: Conversation,
    prompt: str,
    content: BoundContent,
    params: SamplingParams,
) -> PromptConstraints:
    """For the answers to this prompt. content: what their own text is bound to."""
    made = build_answer_grammar(to, asked, one, prompt, content.grammar)
    constraint = content.constraint
    if made is not None and made is not content.grammar:
        param = "tools" if asked.structure is None else asked.structure.param
        constraint = validate.build_constraint(made, content.backend, param=param)
    tokens = params.thinking_token_budget
    if tokens is None:
        return PromptConstraints(constraint)
    return PromptConstraints(
        constraint,
        build_thinking_budget(tokens, to.answer_parsers, build_prompt_tail(to, one, prompt)),
    )


def build_prompt_constraints(
    to: AppState, prompt: str | list[int], content: BoundContent, params: SamplingParams
) -> PromptConstraints:
    """For what goes on with a prompt that no template made."""
    tokens = params.thinking_token_budget
    if tokens is None or not isinstance(prompt, str):
        return PromptConstraints(content.constraint)
    return PromptConstraints(
        content.constraint, build_thinking_budget(tokens, to.answer_parsers, PromptTail(prompt))
    )


def build_answer_grammar(
    to: AppState,
    asked: GenerationRequest,
    one: Conversation,
    prompt: str,
    content: GrammarNode | None,
) -> GrammarNode | None:
    """The form of whole answers to a prompt. content: what the answer's own text is bound to."""
    bound = build_tool_call_plan(to, asked, one, content).answer
    if bound is None:
        return None
    return answer_grammar(
        bound, to.answer_parsers, build_prompt_tail(to, one, prompt), to.structured_defaults
    )


def build_prompt_tail(to: AppState, one: Conversation, prompt: str) -> PromptTail:
    """How the prompt ends, for who reads or binds its answers."""
    begun = message_text(one.messages[-1]) if one.continue_final_message else ""
    return PromptTail(prompt, begun, build_template_variables(to, one))


def build_template_variables(to: AppState, one: Conversation) -> dict[str, Any]:
    """Of the chat template. No effort at all: templates that can switch thinking off are told."""
    options, effort = to.options, one.reasoning_effort
    switch = {"enable_thinking": False} if effort == NO_REASONING_EFFORT else {}
    made = {**options.default_chat_template_kwargs, **switch, **one.template_variables}
    if effort is not None:
        made["reasoning_effort"] = options.reasoning_effort_map.get(effort, effort)
    return made


def template_tools(tools: Sequence[dict[str, Any]] | None) -> Sequence[dict[str, Any]] | None:
    """Tools as a template gets them: what is meant for the server alone is left out."""
    if not tools:
        return tools
    return [_template_tool(tool) for tool in tools]


def _template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or "strict" not in function:
        return dict(tool)
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def resolve_thinking_budget(to: AppState, asked: GenerationRequest) -> GenerationRequest:
    """With wishes for thinking made a budget, where this server can keep one; else it is told."""
    wish = asked.thinking_budget
    efforts = {one.reasoning_effort for one in asked.conversations}
    if wish is None and efforts == {NO_REASONING_EFFORT}:
        wish = 0
    if wish is None or asked.sampling.get("thinking_token_budget") is not None:
        return asked
    if to.answer_parsers is not None and to.answer_parsers.reasoning is not None:
        return replace(asked, sampling={**asked.sampling, "thinking_token_budget": wish})
    if not wish:
        return asked
    return replace(asked, ignored=[*asked.ignored, IgnoredField("thinking.budget_tokens", True)])


def get_answer_parsers(to: AppState) -> AnswerParserFactory:
    """What reads answers; without any parser it reads what calls were forced as plain JSON."""
    return (
        to.answer_parsers
        if to.answer_parsers is not None
        else content_only_factory(to.require_tokenizer())
    )


# -- may it? --------------------------------------------------------------------------------------


def check_tool_choice(to: AppState, asked: GenerationRequest) -> None:
    """Raise RequestError for what of tools and thoughts cannot be had."""
    if asked.sampling.get("thinking_token_budget", -1) not in (None, -1):
        build_thinking_budget(0, to.answer_parsers, PromptTail())
    for one in asked.conversations:
        _check_choice(to, asked, one)


def _check_choice(to: AppState, asked: GenerationRequest, one: Conversation) -> None:
    made = resolve_tool_choice(asked, one)
    word = asked.field_names.get("tool_choice", "tool_choice")
    reads = to.answer_parsers is not None and to.answer_parsers.tools is not None
    if made.is_explicit and made.mode == "auto" and one.tools and not reads:
        message = f"{word} 'auto' needs a server that knows how the model writes calls"
        told = (
            f"{message} (start it with {AUTO_TOOL_CHOICE_FLAGS}); leave it out to get them as text"
        )
        raise RequestError(told, param=word)
    if made.is_required and asked.beams is not None:
        raise RequestError(f"{word} and use_beam_search exclude each other", param=word)
    if made.is_required and asked.sampling.get("detokenize") is False:
        raise RequestError(f"{word} needs text: detokenize must not be false", param="detokenize")
    if made.is_required:
        to.require_tokenizer()
    if one.tools:
        _check_schemas(to, asked, one, made, reads=reads)


def _check_schemas(
    to: AppState,
    asked: GenerationRequest,
    one: Conversation,
    made: ToolChoicePolicy,
    *,
    reads: bool,
) -> None:
    """Each schema that calls will be bound to."""
    assert one.tools is not None
    strict = strict_names(one.tools) if reads and made.mode == "auto" else frozenset()
    if not made.is_required and not strict:
        return
    names = {tool.name for tool in callable_tools(one.tools, made)}
    field = asked.field_names.get("parameters", "function.parameters")
    for place, tool in enumerate(one.tools):
        for name, function in tools_by_name([tool]).items():
            if name in (names if made.is_required else strict):
                check_tool_schema(function, f"tools[{place}].{field}")


def _eos_texts(to: AppState, asked: GenerationRequest) -> frozenset[str]:
    """Texts of the tokens that end the model's answers."""
    if to.tokenizer is None:
        return frozenset()
    backend = to.tokenizer.backend
    return frozenset(backend.id_to_token(i) or "" for i in to.inputs.eos_ids)


def refuse_parsing_without_parser(to: AppState, asked: GenerationRequest) -> None:
    """parallel_tool_calls=false leaves calls out: they must be told from the rest first."""
    for one in asked.conversations:
        if (
            not one.tools
            or asked.parallel_tool_calls
            or resolve_tool_choice(asked, one).mode == "none"
        ):
            continue
        if not build_tool_call_plan(to, asked, one).parses_calls:
            message = "parallel_tool_calls=false needs a server that reads tool calls"
            raise Unsupported(f"{message} ({AUTO_TOOL_CHOICE_FLAGS})", param="parallel_tool_calls")
