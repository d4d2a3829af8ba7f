"""Grammar AST: nodes that define which texts are allowed.

A node is a frozen, hashable value, and JSON text when it is sent to a process (dump_node,
load_node). The server and LLM turn response_format, structured_outputs and tool_choice into nodes
once; quire.grammar.frontends.validate checks them and quire.grammar.backends compiles them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from quire.errors import RequestError


@dataclass(frozen=True, slots=True)
class JsonNode:
    """JSON that a schema allows."""

    schema: str
    """JSON text; "true": any JSON value, '{"type": "object"}': any object."""
    whitespace: bool = True
    """Spaces and line breaks between tokens, at most two in a row; False: none at all."""
    closed: bool = False
    """Objects have no properties that the schema does not name, unless it allows others itself."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between JSON tokens, in place of `whitespace`."""
    owner: str = ""
    """What the schema belongs to, for errors: the function of a tool."""


@dataclass(frozen=True, slots=True)
class RegexNode:
    """Text that matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceNode:
    """One of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserGrammarNode:
    """A grammar in EBNF (`root ::= ...`) or Lark (`start: ...`) form."""

    text: str


@dataclass(frozen=True, slots=True)
class LiteralNode:
    """Exactly this text. A special token's name within it is the token."""

    text: str


@dataclass(frozen=True, slots=True)
class UntilNode:
    """Any text, up to and with the first `terminator`."""

    terminator: str


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """The parts, one after the other."""

    parts: tuple[GrammarNode, ...]


@dataclass(frozen=True, slots=True)
class AlternationNode:
    """One of the parts."""

    parts: tuple[GrammarNode, ...]


@dataclass(frozen=True, slots=True)
class RepeatNode:
    """The part `least` times or more, `between` each two. most: None means without end."""

    part: GrammarNode
    separator: str = ""
    min_count: int = 1
    max_count: int | None = None


@dataclass(frozen=True, slots=True)
class TagNode:
    """Content between two marks."""

    begin: str
    content: GrammarNode
    end: str


@dataclass(frozen=True, slots=True)
class TaggedTextNode:
    """Any text, in which a trigger occurs only where one of the tags begins.

    Each tag begins with one of the triggers.
    """

    triggers: tuple[str, ...]
    tags: tuple[TagNode, ...]
    min_tags: int = 0
    """So many tags at least."""
    only_first: bool = False
    """The text ends behind the first tag."""


GrammarNode = (
    JsonNode
    | RegexNode
    | ChoiceNode
    | UserGrammarNode
    | LiteralNode
    | UntilNode
    | SequenceNode
    | AlternationNode
    | RepeatNode
    | TagNode
    | TaggedTextNode
)

_KINDS: dict[str, type[Any]] = {
    one.__name__.lower(): one
    for one in (
        JsonNode,
        RegexNode,
        ChoiceNode,
        UserGrammarNode,
        LiteralNode,
        UntilNode,
        SequenceNode,
        AlternationNode,
        RepeatNode,
        TagNode,
        TaggedTextNode,
    )
}


def map_json(form: GrammarNode, change: Callable[[JsonNode], GrammarNode]) -> GrammarNode:
    """The same grammar with each JsonNode replaced."""
    match form:
        case JsonNode():
            return change(form)
        case SequenceNode() | AlternationNode():
            parts = tuple(map_json(part, change) for part in form.parts)
            return dataclasses.replace(form, parts=parts)
        case RepeatNode():
            return dataclasses.replace(form, part=map_json(form.part, change))
        case TagNode():
            return dataclasses.replace(form, content=map_json(form.content, change))
        case TaggedTextNode():
            contents = [map_json(tag.content, change) for tag in form.tags]
            tags = (dataclasses.replace(t, content=c) for t, c in zip(form.tags, contents))
            return dataclasses.replace(form, tags=tuple(tags))
    return form


def is_larger(form: GrammarNode, most: int) -> bool:
    """Whether it has more parts, shared ones counted each time."""
    waiting: list[GrammarNode] = [form]
    for _ in range(most):
        if not waiting:
            return False
        one = waiting.pop()
        if isinstance(one, SequenceNode | AlternationNode):
            waiting += one.parts
        elif isinstance(one, RepeatNode):
            waiting.append(one.part)
        elif isinstance(one, TagNode):
            waiting.append(one.content)
        elif isinstance(one, TaggedTextNode):
            waiting += one.tags
    return bool(waiting)


def user_grammars(form: GrammarNode) -> Iterator[str]:
    """The texts of callers' grammars in it."""
    if isinstance(form, UserGrammarNode):
        yield form.text
    elif isinstance(form, SequenceNode | AlternationNode | TaggedTextNode):
        for part in form.tags if isinstance(form, TaggedTextNode) else form.parts:
            yield from user_grammars(part)
    elif isinstance(form, TagNode | RepeatNode):
        yield from user_grammars(form.content if isinstance(form, TagNode) else form.part)


def dump_node(form: GrammarNode) -> str:
    """The form as JSON text: equal forms give equal text."""
    return json.dumps(_to_plain(form), ensure_ascii=False, separators=(",", ":"))


def load_node(text: str) -> GrammarNode:
    """The form of a dump. Raises RequestError: it may have come over a wire."""
    try:
        made = _from_plain(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RequestError(f"not a form of structured output: {error}") from None
    if type(made) not in _KINDS.values():
        raise RequestError("not a form of structured output: it names no kind")
    return cast(GrammarNode, made)


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    given = {
        one.name: _to_plain(getattr(value, one.name))
        for one in dataclasses.fields(value)
        if getattr(value, one.name) != one.default
    }
    return {"kind": type(value).__name__.lower(), **given}


def _from_plain(value: Any) -> Any:
    """Lists become tuples, and objects the forms that they name."""
    if isinstance(value, list):
        return tuple(_from_plain(one) for one in value)
    if not isinstance(value, dict):
        return value
    given = {name: _from_plain(one) for name, one in value.items() if name != "kind"}
    return _KINDS[value["kind"]](**given)
