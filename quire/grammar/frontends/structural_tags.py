"""Converts structural tags, the JSON notation for the form of whole answers, into grammar nodes.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}       the older notation
    {"type": "structural_tag", "format": {"type": ..., ...}}              a tree of formats

_READERS lists the fields that are read. Any other field that would change what is allowed is
refused with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import RequestError
from quire.grammar.grammar_ast import (
    AlternationNode,
    GrammarNode,
    JsonNode,
    LiteralNode,
    RegexNode,
    RepeatNode,
    SequenceNode,
    TaggedTextNode,
    TagNode,
    UntilNode,
    UserGrammarNode,
)

PARAM = "structured_outputs.structural_tag"
ANY_TEXT = RegexNode(r"[\s\S]*")


def structural_tag_to_node(given: object, style: JsonNode) -> GrammarNode:
    """The form of a structural tag that was parsed. style: how JSON within it is written.

    Raises RequestError, with the JSON pointer of what is wrong.
    """
    top = _TagValue(given, "", style)
    given_fields = top.object()
    if "structures" in given_fields:
        return _legacy_format(top)
    if "format" in given_fields:
        return top.child("format").to_node()
    if given_fields.get("type", "structural_tag") == "structural_tag":
        raise top.error("an object with 'format', or with 'structures' and 'triggers'")
    return top.to_node()


@dataclass(frozen=True, slots=True)
class _TagValue:
    """A value within the tag, and its place."""

    value: Any
    pointer: str
    style: JsonNode

    def error(self, allowed: str) -> RequestError:
        where = f"{PARAM} at {self.pointer or '/'}"
        return RequestError(f"{where} must be {allowed}", param=PARAM)

    def object(self) -> Mapping[str, Any]:
        if not isinstance(self.value, dict):
            raise self.error("an object")
        return self.value

    def child(self, name: str) -> _TagValue:
        if name not in self.object():
            raise self.error(f"an object with {name!r}")
        return _TagValue(self.value[name], f"{self.pointer}/{name}", self.style)

    def children(self) -> list[_TagValue]:
        if not isinstance(self.value, list) or not self.value:
            raise self.error("a non-empty list")
        return [_TagValue(v, f"{self.pointer}/{i}", self.style) for i, v in enumerate(self.value)]

    def text(self, *, empty: bool = False) -> str:
        if not isinstance(self.value, str) or not (self.value or empty):
            raise self.error("text" if empty else "non-empty text")
        return self.value

    def flag(self, name: str) -> bool:
        value = self.object().get(name, False)
        if not isinstance(value, bool):
            raise self.child(name).error("true or false")
        return value

    def kind(self) -> str:
        return self.child("type").text()

    def to_json_node(self) -> JsonNode:
        if not isinstance(self.value, (dict, bool)):
            raise self.error("a JSON schema")
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"))
        return replace(self.style, schema=text)

    def to_node(self) -> GrammarNode:
        kind = self.kind()
        if kind not in _PARSERS:
            known = ", ".join(_PARSERS)
            message = f"{PARAM} at {self.pointer}/type: {kind!r:.40} is not read here; {known} are"
            raise RequestError(message, param=PARAM)
        read, fields = _PARSERS[kind]
        for name, value in self.object().items():
            if name not in ("type", *fields) and value not in _IGNORED_VALUES.get(
                name, (None, [], False)
            ):
                where = f"{PARAM} at {self.pointer}/{name}"
                raise RequestError(f"{where}: {name!r:.40} is not read of a {kind}", param=PARAM)
        return read(self)


_IGNORED_VALUES: Mapping[str, tuple[object, ...]] = {"style": (None, "json")}
"""Values of fields that change nothing, besides those that ask for nothing."""


def _legacy_format(top: _TagValue) -> GrammarNode:
    tags = tuple(
        TagNode(
            one.child("begin").text(),
            one.child("schema").to_json_node(),
            one.child("end").text(empty=True),
        )
        for one in top.child("structures").children()
    )
    return _triggered(top, tags)


def _triggered(place: _TagValue, tags: tuple[TagNode, ...]) -> GrammarNode:
    triggers = tuple(one.text() for one in place.child("triggers").children())
    for i, tag in enumerate(tags):
        fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(fitting) != 1:
            message = f"begin of tag {i} ({tag.begin!r:.60}) begins with {len(fitting)} of them"
            raise place.child("triggers").error(f"such that each tag begins with one; {message}")
    least = 1 if place.flag("at_least_one") else 0
    return TaggedTextNode(triggers, tags, min_tags=least, only_first=place.flag("stop_after_first"))


def _triggered_tags(place: _TagValue) -> GrammarNode:
    return _triggered(place, tuple(_tag_parts(one) for one in place.child("tags").children()))


def _tags_with_separator(place: _TagValue) -> GrammarNode:
    tags = tuple(_tag(one) for one in place.child("tags").children())
    return RepeatNode(
        tags[0] if len(tags) == 1 else AlternationNode(tags),
        separator=place.child("separator").text(empty=True),
        min_count=1 if place.flag("at_least_one") else 0,
        max_count=1 if place.flag("stop_after_first") else None,
    )


def _tag(place: _TagValue) -> GrammarNode:
    """Any text within a tag ends with the tag: a form of its own."""
    begin, end = place.child("begin"), place.child("end")
    ends = [one.text() for one in end.children()] if isinstance(end.value, list) else None
    content = place.child("content")
    if ends is None or len(ends) == 1:
        tag = _tag_parts(place)
        return SequenceNode(
            tuple(
                part
                for part in (LiteralNode(tag.begin), tag.content, _literal_or_none(tag.end))
                if part
            )
        )
    if _is_any_text(content):
        raise RequestError(f"{PARAM} at {end.pointer}: any text needs one end", param=PARAM)
    return SequenceNode(
        (
            LiteralNode(begin.text()),
            content.to_node(),
            AlternationNode(tuple(LiteralNode(one) for one in ends)),
        )
    )


def _literal_or_none(text: str) -> LiteralNode | None:
    return LiteralNode(text) if text else None


def _tag_parts(place: _TagValue) -> TagNode:
    if place.kind() != "tag":
        raise place.child("type").error("'tag'")
    begin, content, end = (place.child(name) for name in ("begin", "content", "end"))
    if isinstance(end.value, list):
        if len(end.value) != 1:
            raise RequestError(f"{PARAM} at {end.pointer}: give one end", param=PARAM)
        end = end.children()[0]
    closing = end.text(empty=not _is_any_text(content))
    if _is_any_text(content):
        return TagNode(begin.text(), UntilNode(closing), "")
    return TagNode(begin.text(), content.to_node(), closing)


def _is_any_text(place: _TagValue) -> bool:
    return place.kind() == "any_text"


def _sequence(place: _TagValue) -> GrammarNode:
    """Any text ends where what follows it first occurs."""
    parts: list[GrammarNode] = []
    free = False
    for one in place.child("elements").children():
        made = one.to_node()
        if free:
            if not isinstance(made, LiteralNode):
                message = f"{PARAM} at {one.pointer}: only a const_string can follow any_text"
                raise RequestError(message, param=PARAM)
            parts[-1] = UntilNode(made.text)
        else:
            parts.append(made)
        free = made == ANY_TEXT
    return parts[0] if len(parts) == 1 else SequenceNode(tuple(parts))


def _alternation(place: _TagValue) -> GrammarNode:
    return AlternationNode(tuple(one.to_node() for one in place.child("elements").children()))


def _repeat(place: _TagValue) -> GrammarNode:
    least, most = place.child("min"), place.child("max")
    for one, lowest in ((least, 0), (most, -1)):
        if not isinstance(one.value, int) or isinstance(one.value, bool) or one.value < lowest:
            raise one.error(f"an integer >= {lowest}")
    if -1 < most.value < least.value:
        raise most.error("at least min, or -1")
    end = None if most.value == -1 else most.value
    return RepeatNode(place.child("content").to_node(), min_count=least.value, max_count=end)


def _repeated(least: int, most: int | None) -> Callable[[_TagValue], GrammarNode]:
    return lambda place: RepeatNode(
        place.child("content").to_node(), min_count=least, max_count=most
    )


_TAG = ("begin", "content", "end")
_TAGS = ("tags", "at_least_one", "stop_after_first")
_PARSERS: Mapping[str, tuple[Callable[[_TagValue], GrammarNode], tuple[str, ...]]] = {
    "const_string": (lambda one: LiteralNode(one.child("value").text()), ("value",)),
    "json_schema": (lambda one: one.child("json_schema").to_json_node(), ("json_schema",)),
    "regex": (lambda one: RegexNode(one.child("pattern").text()), ("pattern",)),
    "grammar": (lambda one: UserGrammarNode(one.child("grammar").text()), ("grammar",)),
    "any_text": (lambda one: ANY_TEXT, ()),
    "sequence": (_sequence, ("elements",)),
    "or": (_alternation, ("elements",)),
    "tag": (_tag, _TAG),
    "triggered_tags": (_triggered_tags, ("triggers", *_TAGS)),
    "tags_with_separator": (_tags_with_separator, ("separator", *_TAGS)),
    "optional": (_repeated(0, 1), ("content",)),
    "star": (_repeated(0, None), ("content",)),
    "plus": (_repeated(1, None), ("content",)),
    "repeat": (_repeat, ("min", "max", "content")),
}
"""By type of a format: what reads it, and the fields it reads."""
