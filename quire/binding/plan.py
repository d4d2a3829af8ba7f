"""How the calls of an answer are written and read, decided from what was asked and what can be.

    tool_choice               where a parser knows how calls are written    where none does
    required, a function      calls in the model's own way                  plain JSON (text.forced)
    auto, strict functions    text in which calls are as declared           text, as it comes
    auto                      text in which calls are read                  text, as it comes

What a dialect cannot write of a schema is forced as plain JSON too. In front of all of it reasoning
may stand (quire.binding.reasoning).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from quire.binding import calls
from quire.binding.choice import Choice
from quire.binding.reasoning import ANY_TEXT, Bound
from quire.binding.schemas import Inexpressible
from quire.errors import RequestError
from quire.grammar.forms import Form
from quire.text.forced import LIST, Arguments
from quire.text.speech import Reader
from quire.text.tools import openai
from quire.text.tools.base import Dialect, Tool, declared
from quire.text.tools.choose import Chosen
from quire.text.tools.machine import Parser

Tools = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of calls in one answer.

    bound: what the answer has to be, reasoning aside; None: it is free. own, listed, named: who
    reads calls in it: the parser of the model, that of a plain list, or that of one function's
    arguments; none of them: all of it is content.
    """

    bound: Bound | None = None
    tools: Tools = ()
    own: Chosen | None = None
    listed: bool = False
    named: str | None = None

    @property
    def reads(self) -> bool:
        """Calls are read."""
        return self.own is not None or self.listed or self.named is not None

    def reader(self) -> Reader | None:
        """A reader of the calls of one answer; None: its text is content."""
        if self.named is not None:
            return Arguments(self.named)
        if self.listed:
            return Parser(LIST, self.tools)
        return None if self.own is None else self.own.reader(self.tools)


def plan(
    chosen: Chosen | None,
    tools: Tools,
    choice: Choice,
    *,
    parallel: bool = True,
    ends: Collection[str] = (),
    content: Form | None = None,
) -> Plan:
    """What is to be done. chosen: the parser of the model. ends: texts of its end tokens.

    content: the form of the answer's own text. Raises RequestError for strict functions that the
    dialect has no form for.
    """
    free = None if content is None else Bound(content)
    if choice.mode == "none" or not tools:
        return Plan(free)
    most = None if parallel else 1
    if choice.forces:
        return _forced(chosen, tools, choice, most, ends)
    if chosen is None:
        return Plan(free)
    if content is None and choice.allowed is None and not strict_names(tools):
        return Plan(None, tools, chosen)
    return Plan(_mixed(chosen, tools, choice, most, ends, content), tools, chosen)


def wanted(tools: Tools, choice: Choice) -> list[Tool]:
    """The functions that may be called."""
    known = declared(tools)
    if choice.named is not None:
        return [known[choice.named]]
    allowed = choice.allowed
    return [tool for name, tool in known.items() if allowed is None or name in allowed]


def strict_names(tools: Tools) -> frozenset[str]:
    """Functions whose calls are to be as their schemas say, and not only as a rule."""
    inner = (tool.get("function", tool) for tool in tools)
    found = (one for one in inner if isinstance(one, Mapping) and one.get("strict") is True)
    return frozenset(str(one.get("name")) for one in found)


def _forced(
    chosen: Chosen | None,
    tools: Tools,
    choice: Choice,
    most: int | None,
    ends: Collection[str],
) -> Plan:
    """Nothing but calls."""
    functions = wanted(tools, choice)
    most = 1 if choice.named is not None else most
    try:
        if chosen is not None and chosen.dialect is not None:
            form = calls.calls(chosen.dialect, functions, most=most, ends=ends)
            return Plan(Bound(None, form), tools, chosen)
    except Inexpressible:
        pass  # plain JSON can say everything
    if choice.named is not None:
        return Plan(Bound(None, calls.arguments(functions[0])), tools, named=choice.named)
    return Plan(Bound(None, calls.listed(functions, most=most)), tools, listed=True)


def _mixed(
    chosen: Chosen,
    tools: Tools,
    choice: Choice,
    most: int | None,
    ends: Collection[str],
    content: Form | None,
) -> Bound:
    """Text, or calls, or text with calls in it."""
    dialect = chosen.dialect
    if dialect is None:
        message = f"the tool parser {chosen.name!r} does not say how calls are written"
        raise RequestError(f"{message}, so they cannot be bound to schemas", param="tools")
    strict = strict_names(tools)
    functions = [_expressed(dialect, tool, tool.name in strict) for tool in wanted(tools, choice)]
    if content is None and dialect is not openai.DIALECT:
        try:
            text = calls.among(dialect, functions, only_first=most == 1)
            return Bound(None, text, is_free=True)
        except Inexpressible as error:
            raise _refusal(dialect, str(error)) from None
    return Bound(content or ANY_TEXT, calls.calls(dialect, functions, most=most, ends=ends))


def _expressed(dialect: Dialect, tool: Tool, strict: bool) -> Tool:
    """The function, or if it need not be strict and cannot be one of any arguments."""
    try:
        calls.call(dialect, tool)
    except Inexpressible as error:
        if strict:
            raise _refusal(dialect, f"of {tool.name!r}: {error}") from None
        return Tool(tool.name)
    return tool


def _refusal(dialect: Dialect, what: str) -> RequestError:
    message = f"strict: calls in the dialect {dialect.name!r} cannot be bound to {what}"
    return RequestError(f"{message}; leave strict out, or force the call", param="tools")
