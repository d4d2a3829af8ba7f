"""Arguments that come as text between tags, as JSON: the declared schema says what they are.

A text that is not what its schema asks for stays a string: nothing is lost, and who called can see
what was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.text.tools._source import Tell
from quire.text.tools._values import JSON, PYTHON, begun, escaped, whole
from quire.text.tools.base import Tool

MOST_DEEP = 64

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NULLS = frozenset({"null", "none", "nil"})
_MOST_DIGITS = 1024

TEXT = frozenset({"string"})
ANY = frozenset({"json"})
"""Of a value that is known to be JSON, of whatever kind."""


def kinds_of(tool: Tool | None, key: str) -> frozenset[str]:
    """JSON types that the declared schema allows for a parameter; empty if it does not say."""
    if tool is None:
        return frozenset()
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = tool.parameters.get("additionalProperties")
    return _kinds(schema, tool.parameters, set(), 0)


def _kinds(
    schema: object, root: Mapping[str, object], seen: set[str], depth: int
) -> frozenset[str]:
    """seen: references that were followed already; each is followed once."""
    if not isinstance(schema, Mapping) or depth > MOST_DEEP:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, (list, tuple)):
        return frozenset(kind for kind in named if isinstance(kind, str))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _kinds(_resolved(reference, root), root, seen, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, (list, tuple)):
            return frozenset().union(*(_kinds(option, root, seen, depth + 1) for option in options))
    return _kinds_of_values(schema)


def _kinds_of_values(schema: Mapping[str, object]) -> frozenset[str]:
    values = schema.get("enum")
    if isinstance(values, (list, tuple)):
        return frozenset(_kind_of(value) for value in values)
    if "const" in schema:
        return frozenset({_kind_of(schema["const"])})
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    return "object" if isinstance(value, Mapping) else "array"


def _resolved(reference: str, root: Mapping[str, object]) -> object:
    """What a reference within the schema names; None for any other."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """A value of one of these kinds, as JSON; a string if it is none of them."""
    word = text.strip()
    if kinds == ANY:
        found = whole(word)
        return f'"{escaped(text)}"' if found is None else found
    if "null" in kinds and word.lower() in _NULLS:
        return "null"
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower()
    if len(word) <= _MOST_DIGITS:
        if "integer" in kinds and _INTEGER.fullmatch(word):
            return word
        if "number" in kinds and _NUMBER.fullmatch(word):
            return word
    if ("object" in kinds and word[:1] == "{") or ("array" in kinds and word[:1] in ("[", "(")):
        found = whole(word, JSON) or whole(word, PYTHON)
        if found is not None:
            return found
    return f'"{escaped(text)}"'


class Value:
    """One value as it comes: told at once if it can only be text, else when it is whole."""

    def __init__(self, tell: Tell, kinds: frozenset[str], *, trim: bool) -> None:
        self._tell = tell
        self._kinds = kinds - {"string"}
        self._trim = trim
        self._parts: list[str] = []
        self._held = ""  # a newline that may belong to the closing tag
        self._begun = False
        if not self._kinds:
            tell('"')

    def push(self, text: str) -> None:
        """Add text, which is not empty."""
        if self._trim:
            if not self._begun:
                text = text.removeprefix("\n")
            self._begun = True
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if not text:
            return
        if self._kinds:
            self._parts.append(text)
        else:
            self._tell(escaped(text))

    def end(self) -> None:
        """The value is whole."""
        self._tell(as_json("".join(self._parts), self._kinds) if self._kinds else '"')

    def cut(self) -> None:
        """The text ended here: of an object or array its beginning is told, of a scalar nothing."""
        text = "".join(self._parts)
        if not self._kinds.isdisjoint({"object", "array"}) and text.lstrip()[:1] in ("{", "["):
            self._tell(begun(text))
