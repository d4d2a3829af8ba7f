"""Forms: what text is allowed, in terms that every backend can compile.

A form is a value: frozen, hashable, and JSON text when it travels (dump, load). The server's and
LLM's words (response_format, structured_outputs, tool_choice) become forms once, at the edge.
Not here: whether a form is allowed (quire.grammar.admit), how it is compiled (the backends).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, cast

from quire.errors import RequestError


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that a schema allows."""

    schema: str
    """JSON text; "true": any JSON value, '{"type": "object"}': any object."""
    whitespace: bool = True
    """Spaces and line breaks between tokens, at most two in a row; False: none at all."""
    closed: bool = False
    """Objects hold what the schema names and no more, where it does not say."""
    spacing: str | None = None
    """A regular expression for the white space between JSON tokens, in place of `whitespace`."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in EBNF (`root ::= ...`) or Lark (`start: ...`) form."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text. A special token's name within it stands for the token."""

    text: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text, up to and with the first place where `mark` stands."""

    mark: str


@dataclass(frozen=True, slots=True)
class Seq:
    """The parts, one after the other."""

    parts: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the parts."""

    parts: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part `least` times or more, `between` each two. most: None means without end."""

    part: Form
    between: str = ""
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Tag:
    """What stands between two marks."""

    begin: str
    content: Form
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Any text, in which a trigger may only stand where one of the tags begins.

    Each tag begins with one of the triggers.
    """

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    least: int = 0
    """So many tags at least."""
    only_first: bool = False
    """The text ends behind the first tag."""


Form = Json | Regex | Choice | Grammar | Text | Until | Seq | Either | Repeat | Tag | Tags

_KINDS: dict[str, type[Any]] = {
    one.__name__.lower(): one
    for one in (Json, Regex, Choice, Grammar, Text, Until, Seq, Either, Repeat, Tag, Tags)
}


def has_grammar(form: Form) -> bool:
    """Whether a caller's own grammar stands in it."""
    if isinstance(form, Grammar):
        return True
    if isinstance(form, Seq | Either):
        return any(map(has_grammar, form.parts))
    if isinstance(form, Tags):
        return any(map(has_grammar, form.tags))
    if isinstance(form, Tag):
        return has_grammar(form.content)
    return isinstance(form, Repeat) and has_grammar(form.part)


def dump(form: Form) -> str:
    """The form as JSON text: equal forms give equal text."""
    return json.dumps(_plain(form), ensure_ascii=False, separators=(",", ":"))


def load(text: str) -> Form:
    """The form of a dump. Raises RequestError: it may have come over a wire."""
    try:
        made = _form(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RequestError(f"not a form of structured output: {error}") from None
    if type(made) not in _KINDS.values():
        raise RequestError("not a form of structured output: it names no kind")
    return cast(Form, made)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    given = {
        one.name: _plain(getattr(value, one.name))
        for one in dataclasses.fields(value)
        if getattr(value, one.name) != one.default
    }
    return {"kind": type(value).__name__.lower(), **given}


def _form(value: Any) -> Any:
    """Lists become tuples, and objects the forms that they name."""
    if isinstance(value, list):
        return tuple(_form(one) for one in value)
    if not isinstance(value, dict):
        return value
    given = {name: _form(one) for name, one in value.items() if name != "kind"}
    return _KINDS[value["kind"]](**given)
