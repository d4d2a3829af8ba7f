"""Structural tags -> forms: the JSON in which callers write down forms of whole answers.

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}       the older way
    {"type": "structural_tag", "format": {"type": ..., ...}}              a tree of formats

What of the tree is read stands in _READERS. A field that would change what is allowed and is not
read here is refused, with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import RequestError
from quire.grammar.forms import (
    Either,
    Form,
    Grammar,
    Json,
    Regex,
    Repeat,
    Seq,
    Tag,
    Tags,
    Text,
    Until,
)

PARAM = "structured_outputs.structural_tag"
ANY_TEXT = Regex(r"[\s\S]*")


def form(given: object, style: Json) -> Form:
    """The form of a structural tag that was parsed. style: how JSON within it is written.

    Raises RequestError, with the JSON pointer of what is wrong.
    """
    top = _Place(given, "", style)
    given_fields = top.object()
    if "structures" in given_fields:
        return _older(top)
    if "format" in given_fields:
        return top.at("format").form()
    if given_fields.get("type", "structural_tag") == "structural_tag":
        raise top.wrong("an object with 'format', or with 'structures' and 'triggers'")
    return top.form()


@dataclass(frozen=True, slots=True)
class _Place:
    """A value within the tag, and where it stands."""

    value: Any
    pointer: str
    style: Json

    def wrong(self, allowed: str) -> RequestError:
        where = f"{PARAM} at {self.pointer or '/'}"
        return RequestError(f"{where} must be {allowed}", param=PARAM)

    def object(self) -> Mapping[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def at(self, name: str) -> _Place:
        if name not in self.object():
            raise self.wrong(f"an object with {name!r}")
        return _Place(self.value[name], f"{self.pointer}/{name}", self.style)

    def each(self) -> list[_Place]:
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a non-empty list")
        return [_Place(v, f"{self.pointer}/{i}", self.style) for i, v in enumerate(self.value)]

    def text(self, *, empty: bool = False) -> str:
        if not isinstance(self.value, str) or not (self.value or empty):
            raise self.wrong("text" if empty else "non-empty text")
        return self.value

    def flag(self, name: str) -> bool:
        value = self.object().get(name, False)
        if not isinstance(value, bool):
            raise self.at(name).wrong("true or false")
        return value

    def kind(self) -> str:
        return self.at("type").text()

    def schema(self) -> Json:
        if not isinstance(self.value, (dict, bool)):
            raise self.wrong("a JSON schema")
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"))
        return replace(self.style, schema=text)

    def form(self) -> Form:
        kind = self.kind()
        if kind not in _READERS:
            known = ", ".join(_READERS)
            message = f"{PARAM} at {self.pointer}/type: {kind!r:.40} is not read here; {known} are"
            raise RequestError(message, param=PARAM)
        read, fields = _READERS[kind]
        for name, value in self.object().items():
            if name not in ("type", *fields) and value not in _NEUTRAL.get(name, (None, [], False)):
                where = f"{PARAM} at {self.pointer}/{name}"
                raise RequestError(f"{where}: {name!r:.40} is not read of a {kind}", param=PARAM)
        return read(self)


_NEUTRAL: Mapping[str, tuple[object, ...]] = {"style": (None, "json")}
"""Values of fields that change nothing, besides those that ask for nothing."""


def _older(top: _Place) -> Form:
    tags = tuple(
        Tag(one.at("begin").text(), one.at("schema").schema(), one.at("end").text(empty=True))
        for one in top.at("structures").each()
    )
    return _triggered(top, tags)


def _triggered(place: _Place, tags: tuple[Tag, ...]) -> Form:
    triggers = tuple(one.text() for one in place.at("triggers").each())
    for i, tag in enumerate(tags):
        fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(fitting) != 1:
            message = f"begin of tag {i} ({tag.begin!r:.60}) begins with {len(fitting)} of them"
            raise place.at("triggers").wrong(f"such that each tag begins with one; {message}")
    least = 1 if place.flag("at_least_one") else 0
    return Tags(triggers, tags, least=least, only_first=place.flag("stop_after_first"))


def _triggered_tags(place: _Place) -> Form:
    return _triggered(place, tuple(_tag_parts(one) for one in place.at("tags").each()))


def _tags_with_separator(place: _Place) -> Form:
    tags = tuple(_tag(one) for one in place.at("tags").each())
    return Repeat(
        tags[0] if len(tags) == 1 else Either(tags),
        between=place.at("separator").text(empty=True),
        least=1 if place.flag("at_least_one") else 0,
        most=1 if place.flag("stop_after_first") else None,
    )


def _tag(place: _Place) -> Form:
    """Any text within a tag ends with the tag: a form of its own."""
    begin, end = place.at("begin"), place.at("end")
    ends = [one.text() for one in end.each()] if isinstance(end.value, list) else None
    content = place.at("content")
    if ends is None or len(ends) == 1:
        tag = _tag_parts(place)
        return Seq(tuple(part for part in (Text(tag.begin), tag.content, _said(tag.end)) if part))
    if _is_any_text(content):
        raise RequestError(f"{PARAM} at {end.pointer}: any text needs one end", param=PARAM)
    return Seq((Text(begin.text()), content.form(), Either(tuple(Text(one) for one in ends))))


def _said(text: str) -> Text | None:
    return Text(text) if text else None


def _tag_parts(place: _Place) -> Tag:
    if place.kind() != "tag":
        raise place.at("type").wrong("'tag'")
    begin, content, end = (place.at(name) for name in ("begin", "content", "end"))
    if isinstance(end.value, list):
        if len(end.value) != 1:
            raise RequestError(f"{PARAM} at {end.pointer}: give one end", param=PARAM)
        end = end.each()[0]
    closing = end.text(empty=not _is_any_text(content))
    if _is_any_text(content):
        return Tag(begin.text(), Until(closing), "")
    return Tag(begin.text(), content.form(), closing)


def _is_any_text(place: _Place) -> bool:
    return place.kind() == "any_text"


def _sequence(place: _Place) -> Form:
    """Any text goes as far as what stands behind it first occurs."""
    parts: list[Form] = []
    free = False
    for one in place.at("elements").each():
        made = one.form()
        if free:
            if not isinstance(made, Text):
                message = f"{PARAM} at {one.pointer}: behind any_text only a const_string can stand"
                raise RequestError(message, param=PARAM)
            parts[-1] = Until(made.text)
        else:
            parts.append(made)
        free = made == ANY_TEXT
    return parts[0] if len(parts) == 1 else Seq(tuple(parts))


def _either(place: _Place) -> Form:
    return Either(tuple(one.form() for one in place.at("elements").each()))


def _repeat(place: _Place) -> Form:
    least, most = place.at("min"), place.at("max")
    for one, lowest in ((least, 0), (most, -1)):
        if not isinstance(one.value, int) or isinstance(one.value, bool) or one.value < lowest:
            raise one.wrong(f"an integer >= {lowest}")
    if -1 < most.value < least.value:
        raise most.wrong("at least min, or -1")
    end = None if most.value == -1 else most.value
    return Repeat(place.at("content").form(), least=least.value, most=end)


def _times(least: int, most: int | None) -> Callable[[_Place], Form]:
    return lambda place: Repeat(place.at("content").form(), least=least, most=most)


_TAG = ("begin", "content", "end")
_TAGS = ("tags", "at_least_one", "stop_after_first")
_READERS: Mapping[str, tuple[Callable[[_Place], Form], tuple[str, ...]]] = {
    "const_string": (lambda one: Text(one.at("value").text()), ("value",)),
    "json_schema": (lambda one: one.at("json_schema").schema(), ("json_schema",)),
    "regex": (lambda one: Regex(one.at("pattern").text()), ("pattern",)),
    "grammar": (lambda one: Grammar(one.at("grammar").text()), ("grammar",)),
    "any_text": (lambda one: ANY_TEXT, ()),
    "sequence": (_sequence, ("elements",)),
    "or": (_either, ("elements",)),
    "tag": (_tag, _TAG),
    "triggered_tags": (_triggered_tags, ("triggers", *_TAGS)),
    "tags_with_separator": (_tags_with_separator, ("separator", *_TAGS)),
    "optional": (_times(0, 1), ("content",)),
    "star": (_times(0, None), ("content",)),
    "plus": (_times(1, None), ("content",)),
    "repeat": (_repeat, ("min", "max", "content")),
}
"""By type of a format: what reads it, and the fields it reads."""
