"""What a request's tools and thoughts mean for its answers: forms, readers, budgets.

    check()      before anything runs: may it be asked for, and can it be kept?
    form()       of a whole answer: calls, and all of it behind reasoning
    plan_of()    the same decision, for who reads the answer
    rules()      of a prompt: its form as a constraint, and how long its answers may think

Not here: forms (quire.binding), what response_format says (quire.server.bound).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.binding.choice import Choice, choice
from quire.binding.plan import Plan, plan, strict_names, wanted
from quire.binding.reasoning import Bound
from quire.binding.rules import Rules, budget, check_arguments, whole_form
from quire.core.params import SamplingParams
from quire.errors import RequestError, Unsupported
from quire.grammar import admit
from quire.grammar.forms import Form
from quire.server.asked import Asked, Conversation
from quire.server.strict import Ignored
from quire.text.readers import Began, Readers, plain, text_of
from quire.text.tools.base import declared

if TYPE_CHECKING:
    from quire.server.bound import Bound as BoundContent
    from quire.server.services import Services

AUTO_FLAGS = "--enable-auto-tool-choice --tool-call-parser NAME"
NO_THINKING = "none"
"""The effort that is none at all."""


def choice_of(asked: Asked, one: Conversation) -> Choice:
    """Which calls an answer may make. Raises RequestError."""
    word = asked.words.get("tool_choice", "tool_choice")
    return choice(asked.tool_choice, list(declared(one.tools or ())), word)


def plan_of(to: Services, asked: Asked, one: Conversation, content: Form | None = None) -> Plan:
    """How calls are written and read in the answers to a conversation."""
    if not one.tools:
        return Plan(None if content is None else Bound(content))
    chosen = to.readers.tools if to.readers is not None else None
    return plan(
        chosen,
        one.tools,
        choice_of(asked, one),
        parallel=asked.parallel_tool_calls,
        ends=_ends(to, asked),
        content=content,
    )


def rules(
    to: Services,
    asked: Asked,
    one: Conversation,
    prompt: str,
    content: BoundContent,
    params: SamplingParams,
) -> Rules:
    """For the answers to this prompt. content: what their own text is bound to."""
    made = form(to, asked, one, prompt, content.form)
    constraint = content.constraint
    if made is not None and made is not content.form:
        param = "tools" if asked.structure is None else asked.structure.param
        constraint = admit.constraint(made, content.backend, param=param)
    tokens = params.thinking_token_budget
    if tokens is None:
        return Rules(constraint)
    return Rules(constraint, budget(tokens, to.readers, began_of(to, one, prompt)))


def rules_of_prompt(
    to: Services, prompt: str | list[int], content: BoundContent, params: SamplingParams
) -> Rules:
    """For what goes on with a prompt that no template made."""
    tokens = params.thinking_token_budget
    if tokens is None or not isinstance(prompt, str):
        return Rules(content.constraint)
    return Rules(content.constraint, budget(tokens, to.readers, Began(prompt)))


def form(
    to: Services, asked: Asked, one: Conversation, prompt: str, content: Form | None
) -> Form | None:
    """The form of whole answers to a prompt. content: what the answer's own text is bound to."""
    bound = plan_of(to, asked, one, content).bound
    if bound is None:
        return None
    return whole_form(bound, to.readers, began_of(to, one, prompt), to.house)


def began_of(to: Services, one: Conversation, prompt: str) -> Began:
    """How the prompt ends, for who reads or binds its answers."""
    begun = text_of(one.messages[-1]) if one.continue_final_message else ""
    return Began(prompt, begun, variables(to, one))


def variables(to: Services, one: Conversation) -> dict[str, Any]:
    """Of the chat template. No effort at all: templates that can switch thinking off are told."""
    options, effort = to.options, one.reasoning_effort
    switch = {"enable_thinking": False} if effort == NO_THINKING else {}
    made = {**options.default_chat_template_kwargs, **switch, **one.variables}
    if effort is not None:
        made["reasoning_effort"] = options.reasoning_effort_map.get(effort, effort)
    return made


def shown(tools: Sequence[dict[str, Any]] | None) -> Sequence[dict[str, Any]] | None:
    """Tools as a template gets them: what is meant for the server alone is left out."""
    if not tools:
        return tools
    return [_shown(tool) for tool in tools]


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or "strict" not in function:
        return dict(tool)
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def settled(to: Services, asked: Asked) -> Asked:
    """With wishes for thinking made a budget, where this server can keep one; else it is told."""
    wish = asked.thinking
    efforts = {one.reasoning_effort for one in asked.conversations}
    if wish is None and efforts == {NO_THINKING}:
        wish = 0
    if wish is None or asked.sampling.get("thinking_token_budget") is not None:
        return asked
    if to.readers is not None and to.readers.reasoning is not None:
        return replace(asked, sampling={**asked.sampling, "thinking_token_budget": wish})
    if not wish:
        return asked
    return replace(asked, ignored=[*asked.ignored, Ignored("thinking.budget_tokens", True)])


def reader_of(to: Services) -> Readers:
    """What reads answers; without any parser it reads what calls were forced as plain JSON."""
    return to.readers if to.readers is not None else plain(to.text())


# -- may it? --------------------------------------------------------------------------------------


def check(to: Services, asked: Asked) -> None:
    """Raise RequestError for what of tools and thoughts cannot be had."""
    if asked.sampling.get("thinking_token_budget", -1) not in (None, -1):
        budget(0, to.readers, Began())
    for one in asked.conversations:
        _check_choice(to, asked, one)


def _check_choice(to: Services, asked: Asked, one: Conversation) -> None:
    made = choice_of(asked, one)
    word = asked.words.get("tool_choice", "tool_choice")
    reads = to.readers is not None and to.readers.tools is not None
    if made.said and made.mode == "auto" and one.tools and not reads:
        message = f"{word} 'auto' needs a server that knows how the model writes calls"
        told = f"{message} (start it with {AUTO_FLAGS}); leave it out to get them as text"
        raise RequestError(told, param=word)
    if made.forces and asked.beams is not None:
        raise RequestError(f"{word} and use_beam_search exclude each other", param=word)
    if made.forces and asked.sampling.get("detokenize") is False:
        raise RequestError(f"{word} needs text: detokenize must not be false", param="detokenize")
    if made.forces:
        to.text()
    if one.tools:
        _check_schemas(to, asked, one, made, reads=reads)


def _check_schemas(
    to: Services, asked: Asked, one: Conversation, made: Choice, *, reads: bool
) -> None:
    """Each schema that calls will be bound to."""
    assert one.tools is not None
    strict = strict_names(one.tools) if reads and made.mode == "auto" else frozenset()
    if not made.forces and not strict:
        return
    names = {tool.name for tool in wanted(one.tools, made)}
    field = asked.words.get("parameters", "function.parameters")
    for place, tool in enumerate(one.tools):
        for name, function in declared([tool]).items():
            if name in (names if made.forces else strict):
                check_arguments(function, f"tools[{place}].{field}")


def _ends(to: Services, asked: Asked) -> frozenset[str]:
    """Texts of the tokens that end the model's answers."""
    if to.tokenizer is None:
        return frozenset()
    backend = to.tokenizer.backend
    return frozenset(backend.id_to_token(i) or "" for i in to.inputs.eos_ids)


def refuse_reading_without_parser(to: Services, asked: Asked) -> None:
    """parallel_tool_calls=false leaves calls out: they must be told from the rest first."""
    for one in asked.conversations:
        if not one.tools or asked.parallel_tool_calls or choice_of(asked, one).mode == "none":
            continue
        if not plan_of(to, asked, one).reads:
            message = "parallel_tool_calls=false needs a server that reads tool calls"
            raise Unsupported(f"{message} ({AUTO_FLAGS})", param="parallel_tool_calls")
