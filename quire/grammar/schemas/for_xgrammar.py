"""Writes a Graph for xgrammar, which by itself ignores some keywords and gets others wrong.

What was found of version 0.2.8, by texts that its masks allow: lengths beside a pattern, several
patterns, and multipleOf are ignored; a pattern may match quotes, backslashes and line breaks, which
then stand in the JSON as they are; so may strings with a length; counts within counts come out
wrong; after names by pattern, and in empty lists with prefixItems, white space doubles. Here all
that is written in other words, narrower, or refused.
"""

from __future__ import annotations

import json
from typing import Any

from quire.grammar.automata import regex_ast
from quire.grammar.automata.regex_ast import (
    CharClass,
    RegexAlternation,
    RegexExpr,
    RegexRepeat,
    RegexSequence,
)
from quire.grammar.schemas.document import Value, refuse
from quire.grammar.schemas.emit import MOST_TEXT, Writer, Written
from quire.grammar.schemas.graph import Graph
from quire.grammar.schemas.shapes import Array, Free, Numbers, Object, Shape, Strings, Values

SAFE: regex_ast.CharRanges = ((32, 33), (35, 91), (93, 126), (0xA1, 0xD7FF))
"""Characters that stand for themselves in a JSON string. Classes with more come out as bytes that
are no UTF-8."""
HINT = 'leave the choice of the backend to "auto"'


def text(graph: Graph) -> str:
    """The schema for xgrammar, as JSON text."""
    made = json.dumps(_XWriter(graph).whole(), ensure_ascii=False, separators=(",", ":"))
    if len(made.encode()) > MOST_TEXT:
        refuse("", f"it has over {MOST_TEXT} bytes once its cases are told apart")
    return made


class _XWriter(Writer):
    def shape(self, shape: Shape) -> Written:
        if isinstance(shape, Numbers) and shape.step is not None and shape.step != 1:
            refuse(shape.place, "xgrammar does not hold to multipleOf", HINT)
        if isinstance(shape, Values):
            for value in shape.values:
                _check_value(value, shape.place)
        if isinstance(shape, Strings):
            return _strings(shape)
        return super().shape(shape)

    def array(self, shape: Array) -> Written:
        if shape.first and not shape.least:
            refuse(shape.place, "xgrammar does not bound white space in an empty list here", HINT)
        made = super().array(shape)
        assert isinstance(made, dict)
        if "prefixItems" in made:
            made["prefixItems"] = [{} if one is True else one for one in made["prefixItems"]]
        return made

    def object(self, shape: Object) -> Written:
        for name in shape.named:
            _check_value(name, shape.place)
        if shape.least > len(shape.required) and shape.named:
            refuse(shape.place, "xgrammar cannot ask for properties beside those listed", HINT)
        return super().object(shape)

    def free(self, free: list[Free], made: dict[str, Any]) -> None:
        """Other names than those listed are left out where some are listed."""
        by_pattern = [one for one in free if one.names is not None]
        if by_pattern and not made.get("properties"):
            refuse("", "xgrammar does not hold to patterns of names", HINT)
        super().free([one for one in free if one.names is None], made)


def _check_value(value: Value, place: str) -> None:
    if isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_value(one, place)
    elif isinstance(value, float) and f"{value:.17g}" != repr(value).removesuffix(".0"):
        refuse(place, f"xgrammar writes the number {value!r} with other digits", HINT)
    elif isinstance(value, str) and not value.isascii():
        refuse(place, f"xgrammar does not write {value!r:.40} right", HINT)


def _strings(shape: Strings) -> Written:
    if not shape.patterns and not shape.least and shape.most is None:
        return {"type": "string"}
    if not shape.patterns:
        node: RegexExpr | None = RegexRepeat(CharClass(SAFE), shape.least, shape.most)
    else:
        node = _safe(shape.patterns[0])
        ends = regex_ast.text_lengths(shape.patterns[0]) or (0, 0)
        top = ends[1] if shape.most is None else shape.most
        loose = ends[0] < shape.least or (top is not None and (ends[1] is None or ends[1] > top))
        if len(shape.patterns) > 1 or loose:
            refuse(shape.place, "xgrammar holds to one pattern, and to no length beside it", HINT)
    if node is None or _nested(node):
        refuse(shape.place, "xgrammar does not get this pattern right", HINT)
    return {"type": "string", "pattern": regex_ast.to_anchored_pattern(node)}


def _safe(node: RegexExpr) -> RegexExpr | None:
    """The node without characters that must be escaped in JSON. None: nothing is left."""
    if isinstance(node, CharClass):
        left = regex_ast.intersect_ranges(node.ranges, SAFE)
        return CharClass(left) if left else None
    if isinstance(node, RegexRepeat):
        part = _safe(node.part)
        return (
            (None if node.min_count else regex_ast.EMPTY)
            if part is None
            else RegexRepeat(part, node.min_count, node.max_count)
        )
    if isinstance(node, RegexSequence | RegexAlternation):
        parts = [_safe(part) for part in node.parts]
        kept = tuple(part for part in parts if part is not None)
        if isinstance(node, RegexSequence):
            return RegexSequence(kept) if len(kept) == len(parts) else None
        return RegexAlternation(kept) if kept else None
    return node


def _nested(node: RegexExpr, within: bool = False) -> bool:
    """A count stands within a count."""
    if isinstance(node, RegexRepeat):
        return within or _nested(node.part, True)
    return isinstance(node, RegexSequence | RegexAlternation) and any(
        _nested(part, within) for part in node.parts
    )
