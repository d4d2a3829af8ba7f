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

    answer: the grammar of the answer without reasoning; None: it has none. Its calls are parsed in
    the model's format (parser_factory), as a JSON list (as_json_list), or as the arguments of one
    function; with none of these all of it is content.
    """

    answer: AnswerGrammar | None = None
    tools: ToolDefinitions = ()
    parser_factory: ToolParserFactory | None = None
    as_json_list: bool = False
    function: str | None = None

    @property
    def parses_calls(self) -> bool:
        """Whether calls are parsed."""
        return self.parser_factory is not None or self.as_json_list or self.function is not None

    @property
    def openers(self) -> CallOpeners:
        """Literals that begin a call, also in reasoning."""
        tool_format = None if self.parser_factory is None else self.parser_factory.format
        return {} if tool_format is None else call_openers(tool_format, tools_by_name(self.tools))

    def parser(self) -> StreamingParser | None:
        """A parser of the calls of one answer; None: its text is content."""
        if self.function is not None:
            return JsonArgumentsParser(self.function)
        if self.as_json_list:
            return ToolParser(JSON_LIST_FORMAT, self.tools)
        return None if self.parser_factory is None else self.parser_factory.create(self.tools)


def plan_tool_calls(
    parser_factory: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    *,
    parallel: bool = True,
    eos_texts: Collection[str] = (),
    content: GrammarNode | None = None,
) -> ToolCallPlan:
    """Plan the calls of one request.

    parser_factory: of the model's format. eos_texts: texts of the model's end tokens. content: the
    grammar of the answer's text. Raises RequestError for strict functions that the format cannot
    express.
    """
    plan = _plan(
        parser_factory, tools, choice, parallel=parallel, eos_texts=eos_texts, content=content
    )
    if plan.answer is None:
        return plan
    functions = tuple(tool.name for tool in callable_tools(tools, choice)) if tools else ()
    answer = replace(plan.answer, openers=tuple(plan.openers), functions=functions)
    return replace(plan, answer=answer)


def _plan(
    parser_factory: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    *,
    parallel: bool,
    eos_texts: Collection[str],
    content: GrammarNode | None,
) -> ToolCallPlan:
    content_only = None if content is None else AnswerGrammar(content)
    if choice.mode == "none" or not tools:
        return ToolCallPlan(content_only)
    max_calls = None if parallel else 1
    if choice.is_required:
        return _plan_required(parser_factory, tools, choice, max_calls, eos_texts)
    if parser_factory is None:
        return ToolCallPlan(content_only)
    if content is None and choice.allowed is None and not strict_names(tools):
        return ToolCallPlan(None, tools, parser_factory)
    return ToolCallPlan(
        _plan_auto(parser_factory, tools, choice, max_calls, eos_texts, content),
        tools,
        parser_factory,
    )


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
    parser_factory: ToolParserFactory | None,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    max_calls: int | None,
    eos_texts: Collection[str],
) -> ToolCallPlan:
    """The answer is calls only."""
    functions = callable_tools(tools, choice)
    max_calls = 1 if choice.function is not None else max_calls
    try:
        if parser_factory is not None and parser_factory.format is not None:
            grammar = call_grammar.calls_grammar(
                parser_factory.format, functions, max_calls=max_calls, eos_texts=eos_texts
            )
            return ToolCallPlan(AnswerGrammar(None, grammar), tools, parser_factory)
    except InexpressibleSchema:
        pass  # plain JSON can express everything
    if choice.function is not None:
        return ToolCallPlan(
            AnswerGrammar(None, call_grammar.arguments_node(functions[0])),
            tools,
            function=choice.function,
        )
    return ToolCallPlan(
        AnswerGrammar(None, call_grammar.json_list_grammar(functions, max_calls=max_calls)),
        tools,
        as_json_list=True,
    )


def _plan_auto(
    parser_factory: ToolParserFactory,
    tools: ToolDefinitions,
    choice: ToolChoicePolicy,
    max_calls: int | None,
    eos_texts: Collection[str],
    content: GrammarNode | None,
) -> AnswerGrammar:
    """The answer is text, calls, or text with calls."""
    tool_format = parser_factory.format
    if tool_format is None:
        message = f"the tool parser {parser_factory.name!r} has no format of calls"
        raise RequestError(f"{message}, so they cannot be bound to schemas", param="tools")
    strict = strict_names(tools)
    functions = [
        _expressible_tool(tool_format, tool, tool.name in strict)
        for tool in callable_tools(tools, choice)
    ]
    if content is None and not tool_format.channels:
        try:
            text = call_grammar.text_with_calls_grammar(
                tool_format, functions, only_first=max_calls == 1
            )
            return AnswerGrammar(None, text, is_unconstrained=True)
        except InexpressibleSchema as error:
            raise _inexpressible_error(tool_format, str(error)) from None
    return AnswerGrammar(
        content or ANY_TEXT,
        call_grammar.calls_grammar(
            tool_format, functions, max_calls=max_calls, eos_texts=eos_texts
        ),
    )


def _expressible_tool(tool_format: ToolFormat, tool: Tool, strict: bool) -> Tool:
    """Grammar of the function; with any arguments if it is not strict and cannot be expressed."""
    try:
        call_grammar.call_grammar(tool_format, tool)
    except InexpressibleSchema as error:
        if strict:
            raise _inexpressible_error(tool_format, f"of {tool.name!r}: {error}") from None
        return Tool(tool.name)
    return tool


def _inexpressible_error(tool_format: ToolFormat, what: str) -> RequestError:
    message = f"strict: calls in the format {tool_format.name!r} cannot be bound to {what}"
    return RequestError(f"{message}; leave strict out, or force the call", param="tools")
