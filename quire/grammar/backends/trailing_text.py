"""Finds forms in which a part follows text without a clear end.

A lexer reads such text as far as possible, so the part that follows it is never reached.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quire.grammar.automata import regex_ast
from quire.grammar.automata.to_regex import to_regex
from quire.grammar.backends.lexemes import LexemeWriter
from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
)

_ANY_TEXT = UntilNode("\n")
_BEGINS = {
    "object": "{",
    "array": "[",
    "string": '"',
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tf",
    "null": "n",
}
"""What JSON of a type begins with."""
_ALL = regex_ast.ALL_CHARS
_LEXEME_WRITER = LexemeWriter(lambda node: "")


def continues_after_trailing_text(form: GrammarNode) -> bool:
    """Somewhere in the form a part follows text that has no clear end."""
    if _to_regex(form) is not None:
        return False
    if isinstance(form, TagNode):
        return _sequence_continues(_tag_parts(form))
    if isinstance(form, SequenceNode):
        return _sequence_continues(form.parts)
    if isinstance(form, AlternationNode):
        return any(map(continues_after_trailing_text, form.parts))
    if isinstance(form, TaggedTextNode):
        behind = () if form.only_first else (_ANY_TEXT,)
        return any(_sequence_continues((*_tag_parts(tag), *behind)) for tag in form.tags)
    if isinstance(form, RepeatNode):
        again = form.max_count is None or form.max_count > 1
        return _sequence_continues(
            (form.part, LiteralNode(form.separator), form.part) if again else (form.part,)
        )
    return False


def _sequence_continues(parts: Iterable[GrammarNode]) -> bool:
    known = [part for part in _flatten(parts) if not _is_empty(part)]
    run: list[regex_ast.RegexExpr] = []
    for at, part in enumerate(known):
        node = _to_regex(part)
        if node is not None:
            run.append(node)
            continue
        if (
            run
            and regex_ast.intersect_ranges(_chars(run), _first_chars(part))
            and not _LEXEME_WRITER.has_clear_end(run)
        ):
            return True
        if continues_after_trailing_text(part) or (_has_open_end(part) and at + 1 < len(known)):
            return True
        run = []
    return False


def _has_open_end(form: GrammarNode) -> bool:
    """Whether it may end with any text, which could be longer as well."""
    if isinstance(form, TaggedTextNode):
        return not (form.min_tags and form.only_first) or any(map(_has_open_end, form.tags))
    if isinstance(form, AlternationNode):
        return any(map(_has_open_end, form.parts))
    if isinstance(form, RepeatNode):
        return form.max_count != 0 and _has_open_end(form.part)
    parts = (
        form.parts
        if isinstance(form, SequenceNode)
        else _tag_parts(form)
        if isinstance(form, TagNode)
        else ()
    )
    last = next((part for part in reversed(parts) if not _is_empty(part)), None)
    return last is not None and _has_open_end(last)


def _first_chars(form: GrammarNode) -> regex_ast.CharRanges:
    """Characters that its texts may begin with, or more."""
    node = _to_regex(form)
    if node is not None:
        return regex_ast.ALL_CHARS
    if isinstance(form, JsonNode):
        return _json_first_chars(form)
    if isinstance(form, AlternationNode):
        return regex_ast.union_ranges(*map(_first_chars, form.parts))
    return _ALL


def _json_first_chars(form: JsonNode) -> regex_ast.CharRanges:
    try:
        schema = json.loads(form.schema)
    except (ValueError, RecursionError):
        schema = None  # the compiler refuses it
    kind = schema.get("type") if isinstance(schema, dict) else None
    chars = _BEGINS.get(kind) if isinstance(kind, str) else None
    chars = "".join(_BEGINS.values()) if chars is None else chars
    return regex_ast.union_ranges(tuple((ord(char), ord(char)) for char in chars))


def _chars(nodes: Sequence[regex_ast.RegexExpr]) -> regex_ast.CharRanges:
    """Characters that occur anywhere in them."""
    found: regex_ast.CharRanges = ()
    for node in nodes:
        if isinstance(node, regex_ast.CharClass):
            found = regex_ast.union_ranges(found, node.ranges)
        elif isinstance(node, regex_ast.RegexRepeat):
            found = regex_ast.union_ranges(found, _chars((node.part,)))
        elif isinstance(node, regex_ast.RegexSequence | regex_ast.RegexAlternation):
            found = regex_ast.union_ranges(found, _chars(node.parts))
    return found


def _to_regex(form: GrammarNode) -> regex_ast.RegexExpr | None:
    return to_regex(form, lambda text: [text] if text else [])


def _flatten(parts: Iterable[GrammarNode]) -> Iterable[GrammarNode]:
    for part in parts:
        if isinstance(part, SequenceNode):
            yield from _flatten(part.parts)
        elif isinstance(part, TagNode):
            yield from _flatten(_tag_parts(part))
        else:
            yield part


def _tag_parts(tag: TagNode) -> tuple[GrammarNode, GrammarNode, GrammarNode]:
    return LiteralNode(tag.begin), tag.content, LiteralNode(tag.end)


def _is_empty(form: GrammarNode) -> bool:
    return form == LiteralNode("") or (
        isinstance(form, SequenceNode | AlternationNode) and all(map(_is_empty, form.parts))
    )
