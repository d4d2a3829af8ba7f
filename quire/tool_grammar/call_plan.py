"""Decides how the calls of an answer are written and parsed.

    tool_choice               where a parser has a call format              where none does
    required, a function      calls in the model's own format               plain JSON
    auto, strict functions    text in which calls are as declared           text, as it comes
    auto                      text in which calls are parsed                text, as it comes

Schemas that a format cannot express are forced as plain JSON too. Reasoning may come before all of
it (quire.tool_grammar.after_reasoning).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.errors import RequestError
from quire.grammar.grammar_ast import GrammarNode
from quire.text.output.json_tool_parser import JSON_LIST_FORMAT, JsonArgumentsParser
from quire.text.output.parsed_text import StreamingParser
from quire.text.tools._call_openers import CallOpeners, call_openers
from quire.text.tools.base import Tool, ToolFormat, tools_by_name
from quire.text.tools.parser import ToolParser
from quire.text.tools.select import ToolParserFactory
from quire.tool_grammar import call_grammar
from quire.tool_grammar.after_reasoning import ANY_TEXT, AnswerGrammar
from quire.tool_grammar.parameter_schemas import InexpressibleSchema
from quire.tool_grammar.tool_choice import ToolChoicePolicy

ToolDefinitions = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ToolCallPlan:
    """How the calls of one answer are forced and parsed.

    bound: the form of the answer without reasoning; None: it is free. own, listed, named: the
    parser of its calls: that of the model, of a plain list, or of one function's arguments; none of
    them: all of it is content.
    """

    answer: AnswerGrammar | None = None
    tools: ToolDefinitions = ()
    parser_factory: ToolParserFactory | None = None
    as_json_list: bool = False
    function: str | None = None

    @property
    def parses_calls(self) -> bool:
        """Calls are read."""
        return self.parser_factory is not None or self.as_json_list or self.function is not None

    @property
    def openers(self) -> CallOpeners:
        """Literals that begin a call, also in reasoning."""
        tool_format = None if self.parser_factory is None else self.parser_factory.format
        return {} if tool_format is None else call_openers(tool_format, tools_by_name(self.tools))

    def parser(self) -> StreamingParser | None:
        """A reader of the calls of one answer; None: its text is content."""
        if self.function is not None:
            return JsonArgumentsParser(self.function)
        if self.as_json_list:
            return ToolParser(JSON_LIST_FORMAT, self.tools)
        return None if self.parser_factory is None else self.parser_factory.create(self.tools)


def plan_tool_calls(
    chosen: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    *,
    parallel: bool = True,
    ends: Collection[str] = (),
    content: GrammarNode | None = None,
) -> ToolCallPlan:
    """The plan of one request. chosen: the parser of the model. ends: texts of its end tokens.

    content: the form of the answer's own text. Raises RequestError for strict functions that the
    format cannot express.
    """
    plan = _plan(chosen, tools, choice, parallel=parallel, ends=ends, content=content)
    if plan.answer is None:
        return plan
    functions = tuple(tool.name for tool in callable_tools(tools, choice)) if tools else ()
    answer = replace(plan.answer, openers=tuple(plan.openers), functions=functions)
    return replace(plan, answer=answer)


def _plan(
    chosen: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    *,
    parallel: bool,
    ends: Collection[str],
    content: GrammarNode | None,
) -> ToolCallPlan:
    free = None if content is None else AnswerGrammar(content)
    if choice.mode == "none" or not tools:
        return ToolCallPlan(free)
    most = None if parallel else 1
    if choice.is_required:
        return _plan_required(chosen, tools, choice, most, ends)
    if chosen is None:
        return ToolCallPlan(free)
    if content is None and choice.allowed is None and not strict_names(tools):
        return ToolCallPlan(None, tools, chosen)
    return ToolCallPlan(_plan_auto(chosen, tools, choice, most, ends, content), tools, chosen)


def callable_tools(tools: ToolDefinitions, choice: ToolChoicePolicy) -> list[Tool]:
    """The functions that may be called."""
    known = tools_by_name(tools)
    if choice.function is not None:
        return [known[choice.function]]
    allowed = choice.allowed
    return [tool for name, tool in known.items() if allowed is None or name in allowed]


def strict_names(tools: ToolDefinitions) -> frozenset[str]:
    """Functions with calls that must be valid under their schemas."""
    inner = (tool.get("function", tool) for tool in tools)
    found = (one for one in inner if isinstance(one, Mapping) and one.get("strict") is True)
    return frozenset(str(one.get("name")) for one in found)


def _plan_required(
    chosen: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    most: int | None,
    ends: Collection[str],
) -> ToolCallPlan:
    """Nothing but calls."""
    functions = callable_tools(tools, choice)
    most = 1 if choice.function is not None else most
    try:
        if chosen is not None and chosen.format is not None:
            form = call_grammar.calls_grammar(chosen.format, functions, most=most, ends=ends)
            return ToolCallPlan(AnswerGrammar(None, form), tools, chosen)
    except InexpressibleSchema:
        pass  # plain JSON can express everything
    if choice.function is not None:
        return ToolCallPlan(
            AnswerGrammar(None, call_grammar.arguments_node(functions[0])),
            tools,
            function=choice.function,
        )
    return ToolCallPlan(
        AnswerGrammar(None, call_grammar.json_list_grammar(functions, most=most)),
        tools,
        as_json_list=True,
    )


def _plan_auto(
    chosen: ToolParserFactory,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    most: int | None,
    ends: Collection[str],
    content: GrammarNode | None,
) -> AnswerGrammar:
    """Text, or calls, or text with calls in it."""
    dialect = chosen.format
    if dialect is None:
        message = f"the tool parser {chosen.name!r} has no format of calls"
        raise RequestError(f"{message}, so they cannot be bound to schemas", param="tools")
    strict = strict_names(tools)
    functions = [
        _expressible_tool(dialect, tool, tool.name in strict)
        for tool in callable_tools(tools, choice)
    ]
    if content is None and not dialect.channels:
        try:
            text = call_grammar.text_with_calls_grammar(dialect, functions, only_first=most == 1)
            return AnswerGrammar(None, text, is_unconstrained=True)
        except InexpressibleSchema as error:
            raise _inexpressible_error(dialect, str(error)) from None
    return AnswerGrammar(
        content or ANY_TEXT, call_grammar.calls_grammar(dialect, functions, most=most, ends=ends)
    )


def _expressible_tool(dialect: ToolFormat, tool: Tool, strict: bool) -> Tool:
    """The function, or if it need not be strict and cannot be one of any arguments."""
    try:
        call_grammar.call_grammar(dialect, tool)
    except InexpressibleSchema as error:
        if strict:
            raise _inexpressible_error(dialect, f"of {tool.name!r}: {error}") from None
        return Tool(tool.name)
    return tool


def _inexpressible_error(dialect: ToolFormat, what: str) -> RequestError:
    message = f"strict: calls in the dialect {dialect.name!r} cannot be bound to {what}"
    return RequestError(f"{message}; leave strict out, or force the call", param="tools")
