"""Patterns, formats and lengths of strings, in the spelling that llguidance compiles exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.grammar import regex, texts
from quire.grammar.json_schema import formats
from quire.grammar.json_schema.document import Part, pattern, refuse
from quire.grammar.regex import NOTHING, Alt, Chars, Node, Repeat, Seq

UNWRITTEN: regex.Ranges = ((0, 7), (11, 11), (14, 31), (127, 127))
"""Control characters without an escape of one letter. Patterns leave them out: with them llguidance
1.9 lets a quote or a backslash pass that a class excludes. No text has them otherwise, as escapes by
number are off: with those a listed property could be written a second time under another schema."""
ESCAPES = 'nrbtf\\"'
"""What may follow a backslash."""
MOST_BARRED = 64
"""Constants, and characters of one, of which a pattern is the complement."""


def anchored(node: Node) -> str:
    """A pattern in llguidance's spelling."""
    return regex.anchored(_without_control(node))


def _without_control(node: Node) -> Node:
    if isinstance(node, Chars):
        return Chars(regex.common(node.ranges, regex.others(UNWRITTEN)))
    if isinstance(node, Repeat):
        part = _without_control(node.part)
        empty = regex.EMPTY if node.least == 0 else NOTHING
        return empty if part == NOTHING else Repeat(part, node.least, node.most)
    if isinstance(node, Alt):
        parts = tuple(one for one in map(_without_control, node.parts) if one != NOTHING)
        return Alt(parts) if parts else NOTHING
    if isinstance(node, Seq):
        parts = tuple(map(_without_control, node.parts))
        return NOTHING if NOTHING in parts else Seq(parts)
    return node


def is_writable(text: str) -> bool:
    """The text has no control characters that are never written."""
    return not any(low <= ord(char) <= high for char in text for low, high in UNWRITTEN)


def matches(node: Node, text: str) -> bool | None:
    """Whether a pattern matches the text. None: the pattern is too large to tell."""
    try:
        return texts.matches(node, text)
    except texts.TooComplex:
        return None


def nodes(part: Part, with_length: bool = False) -> list[Node]:
    """The pattern and the format of a subschema; with_length: its lengths as another pattern."""
    found = []
    if part.get("pattern") is not None:
        found.append(pattern(part.value["pattern"], part.at("pattern")))
    if (node := formats.node(part.get("format", ""))) is not None:
        found.append(node)
    least, most = int(part.get("minLength", 0)), part.get("maxLength")
    if with_length and (least or most is not None):
        found.append(Repeat(Chars(regex.ALL), least, None if most is None else int(most)))
    return found


def written(part: Part, every: list[Any]) -> dict[str, Any]:
    """The keywords of strings, for llguidance. every: further schemas that must hold."""
    made: dict[str, Any] = {
        word: int(part.value[word]) for word in ("minLength", "maxLength") if word in part.value
    }
    limit = formats.MOST_LENGTH.get(part.get("format"))
    if limit is not None:
        made["maxLength"] = min(made.get("maxLength", limit), limit)
    patterns = []
    for node in nodes(part):
        if _without_control(node) == NOTHING:
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


def _other_text(tree: dict[str, Any]) -> str:
    """The pattern of every text that the tree of characters does not spell."""
    chars = [char for char in tree if char]
    points = regex.union(*(((ord(char), ord(char)),) for char in chars), UNWRITTEN)
    ways = [_class(regex.others(points)) + _class(regex.others(UNWRITTEN)) + "*"]
    ways += [f"{regex.text(regex.literal(char))}{_other_text(tree[char])}" for char in chars]
    return f"(?:{'|'.join(ways)})" + ("" if "" in tree else "?")


def _class(ranges: regex.Ranges) -> str:
    return regex.text(Chars(ranges))
