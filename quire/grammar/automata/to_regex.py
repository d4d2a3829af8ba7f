"""Converts grammar nodes that are regular into regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.grammar.automata import regex_ast
from quire.grammar.grammar_ast import (
    AlternationNode,
    ChoiceNode,
    GrammarNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TagNode,
)

MAX_POSITIONS = 20_000
"""Characters of one, its counts written out."""

TokenSplitter = Callable[[str], Sequence[str | int]]
"""A text in pieces, special tokens as their ids: Names.cut."""


def to_regex(form: GrammarNode, cut: TokenSplitter) -> regex_ast.RegexExpr | None:
    """The form as a regular expression, where it is one and holds no special token."""
    if isinstance(form, RegexNode):
        return regex_ast.without_anchors(regex_ast.parse_regex(form.pattern), search=False)
    if isinstance(form, ChoiceNode):
        return regex_ast.RegexAlternation(tuple(map(regex_ast.literal_regex, form.options)))
    if isinstance(form, LiteralNode):
        is_plain = all(isinstance(piece, str) for piece in cut(form.text))
        return regex_ast.literal_regex(form.text) if is_plain else None
    if isinstance(form, SequenceNode | AlternationNode):
        parts = [to_regex(part, cut) for part in form.parts]
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            return None
        return (
            regex_ast.RegexSequence(known)
            if isinstance(form, SequenceNode)
            else regex_ast.RegexAlternation(known)
        )
    if isinstance(form, RepeatNode):
        return _repeat_to_regex(form, cut)
    if isinstance(form, TagNode):
        return to_regex(
            SequenceNode((LiteralNode(form.begin), form.content, LiteralNode(form.end))), cut
        )
    return None


def _repeat_to_regex(form: RepeatNode, cut: TokenSplitter) -> regex_ast.RegexExpr | None:
    part, between = to_regex(form.part, cut), to_regex(LiteralNode(form.separator), cut)
    if part is None or between is None:
        return None
    if form.max_count == 0:
        return regex_ast.EMPTY
    most = None if form.max_count is None else form.max_count - 1
    more = regex_ast.RegexRepeat(
        regex_ast.RegexSequence((between, part)), max(form.min_count - 1, 0), most
    )
    some = regex_ast.RegexSequence((part, more))
    made = some if form.min_count else regex_ast.RegexRepeat(some, 0, 1)
    return made if regex_ast.count_positions(made) <= MAX_POSITIONS else None
