"""Patterns, formats and lengths of strings, in the spelling that llguidance compiles exactly."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from quire.errors import RequestError
from quire.grammar.automata import dfa
from quire.grammar.automata import regex_ast as regex
from quire.grammar.automata.regex_ast import (
    NO_MATCH,
    CharClass,
    RegexAlternation,
    RegexExpr,
    RegexRepeat,
    RegexSequence,
)
from quire.grammar.json_schema import formats
from quire.grammar.json_schema.document import Subschema, pattern, refuse

UNWRITTEN: regex.CharRanges = ((0, 7), (11, 11), (14, 31), (127, 127))
"""Control characters without an escape of one letter. No text has them, because escapes by number
are off: with those a listed property could be written again under another schema. Patterns leave
them out: with them llguidance 1.9 allows a quote or a backslash that a class excludes."""
WRITTEN = regex.complement_ranges(UNWRITTEN)
ESCAPES = 'nrbtf\\"'
"""What may follow a backslash where a schema lists properties."""
MOST_LENGTH = 2**31
"""Characters; no text is longer, and llguidance reads no greater maxLength."""
MOST_BARRED = 64
"""Constants, and characters of one, of which a pattern is the complement."""


@functools.lru_cache(maxsize=1024)
def anchored(node: RegexExpr) -> str:
    """A pattern in llguidance's spelling."""
    return regex.to_anchored_pattern(_without_control(node))


@functools.lru_cache(maxsize=1024)
def is_writable_pattern(node: RegexExpr) -> bool:
    """Some text without control characters matches it."""
    return _without_control(node) != NO_MATCH


def _without_control(node: RegexExpr) -> RegexExpr:
    if isinstance(node, CharClass):
        return CharClass(regex.intersect_ranges(node.ranges, WRITTEN))
    if isinstance(node, RegexRepeat):
        part = _without_control(node.part)
        empty = regex.EMPTY if node.min_count == 0 else NO_MATCH
        return empty if part == NO_MATCH else RegexRepeat(part, node.min_count, node.max_count)
    if isinstance(node, RegexAlternation):
        parts = tuple(one for one in map(_without_control, node.parts) if one != NO_MATCH)
        return RegexAlternation(parts) if parts else NO_MATCH
    if isinstance(node, RegexSequence):
        parts = tuple(map(_without_control, node.parts))
        return NO_MATCH if NO_MATCH in parts else RegexSequence(parts)
    return node


def is_writable(text: str) -> bool:
    """The text has no control characters that are never written."""
    return not any(low <= ord(char) <= high for char in text for low, high in UNWRITTEN)


def matches(node: RegexExpr, text: str) -> bool | None:
    """Whether a pattern matches the text. None: the pattern is too large."""
    try:
        return dfa.fully_matches(node, text)
    except dfa.DfaTooComplex:
        return None


def nodes(part: Subschema) -> list[RegexExpr]:
    """The pattern and the format of a subschema: what every dialect of patterns matches."""
    found = []
    if part.get("pattern") is not None:
        found.append(pattern(part.value["pattern"], part.at("pattern")))
    node = formats.node(part.get("format", ""))
    return [*found, node] if node is not None else found


def lengths(part: Subschema) -> list[RegexExpr]:
    """The lengths of a subschema as a pattern."""
    least, most = int(part.get("minLength", 0)), part.get("maxLength")
    if not least and most is None:
        return []
    return [RegexRepeat(CharClass(regex.ALL_CHARS), least, None if most is None else int(most))]


def is_readable(given: str) -> bool:
    """A grammar can follow the pattern. Patterns that are malformed count: they are refused."""
    try:
        dfa.split_lookaheads(given)
    except regex.UnsupportedRegex:
        return False
    except RequestError:
        return True
    return True


def written(part: Subschema, every: list[Any]) -> dict[str, Any]:
    """The keywords of strings, for llguidance. every: further schemas that must hold."""
    made: dict[str, Any] = {
        word: int(part.value[word])
        for word in ("minLength", "maxLength")
        if word in part.value and part.value[word] <= MOST_LENGTH
    }
    limit = formats.MOST_LENGTH.get(part.get("format"))
    if limit is not None:
        made["maxLength"] = min(made.get("maxLength", limit), limit)
    patterns = []
    for node in nodes(part):
        if not is_writable_pattern(node):
            refuse(part.at("pattern"), "it matches control characters only, which are not written")
        patterns.append({"pattern": anchored(node)})
    every += patterns[1:]
    return {**made, **(patterns[0] if patterns else {})}


def not_of(values: list[str]) -> Iterator[dict[str, Any]]:
    """Strings but these, if there are any."""
    if not values or len(values) > MOST_BARRED or max(map(len, values)) > MOST_BARRED:
        return
    tree: dict[str, Any] = {}
    for text in values:
        at = tree
        for char in text:
            at = at.setdefault(char, {})
        at[""] = {}
    yield {"type": "string", "pattern": f"^{_other_text(tree)}$"}


def may_meet(node: RegexExpr, other: RegexExpr) -> bool:
    """Some text may match both patterns."""
    try:
        return dfa.intersects(node, other)
    except dfa.DfaTooComplex:
        return True


def without(node: RegexExpr, other: RegexExpr) -> RegexExpr | None:
    """Texts of the first that the second does not match. None: they are too large."""
    try:
        return dfa.difference([node], [other])
    except dfa.DfaTooComplex:
        return None


def _other_text(tree: dict[str, Any]) -> str:
    """The pattern of every text that the tree of characters does not spell."""
    chars = [char for char in tree if char]
    points = regex.union_ranges(*(((ord(char), ord(char)),) for char in chars), UNWRITTEN)
    ways = [_class(regex.complement_ranges(points)) + _class(WRITTEN) + "*"]
    ways += [
        f"{regex.to_pattern(regex.literal_regex(char))}{_other_text(tree[char])}" for char in chars
    ]
    return f"(?:{'|'.join(ways)})" + ("" if "" in tree else "?")


def _class(ranges: regex.CharRanges) -> str:
    return regex.to_pattern(CharClass(ranges))
