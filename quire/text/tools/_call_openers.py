"""Literals that begin a call in any text, and what must follow them in reasoning.

A model that reasons may write a call without closing its reasoning first, and it may write about
the markup of calls. Only a literal that a call follows ends the reasoning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quire.text.tools.base import (
    ArgumentsStep,
    BranchStep,
    CallSyntax,
    LiteralStep,
    NameStep,
    ObjectStep,
    PythonCallsStep,
    RepeatStep,
    SyntaxStep,
    ToolFormat,
)

CallOpeners = Mapping[str, tuple[str, ...]]
"""By opening literal: the literals of which one follows, after whitespace."""


def call_openers(tool_format: ToolFormat, names: Collection[str]) -> CallOpeners:
    """The opening literals of a format. names: of the declared functions.

    Bare syntaxes have none, nor have calls that are messages: their headers end reasoning.
    """
    found: dict[str, tuple[str, ...]] = {}
    for syntax in tool_format.syntaxes:
        followers = () if syntax.bare else tuple(sorted(_followers(syntax, names)))
        found |= {mark: followers for mark in syntax.begin if followers}
    return found


def _followers(syntax: CallSyntax, names: Collection[str]) -> set[str]:
    if syntax.reread_chars:
        return {"{"}
    return _first_literals(syntax.steps, names)


def _first_literals(steps: Sequence[SyntaxStep], names: Collection[str]) -> set[str]:
    """Literals with which a call of these steps can begin."""
    if not steps:
        return set()
    first = steps[0]
    match first:
        case LiteralStep():
            return {*first.texts, *(_first_literals(steps[1:], names) if first.optional else ())}
        case NameStep():
            return {f"functions.{name}" for name in names} if first.numbered else set(names)
        case ArgumentsStep():
            return {"{"}
        case ObjectStep():
            return {"{", "["} if first.many else {"{"}
        case PythonCallsStep():
            return set(names) if first.lines else {"["}
        case RepeatStep():
            return _first_literals(first.steps, names)
        case BranchStep():
            return _first_literals(first.then, names) | _first_literals(first.otherwise, names)
    return set()
