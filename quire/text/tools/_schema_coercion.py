"""Converts arguments written as text between tags to JSON, by the types of the declared schema.

A text that does not match its schema stays a string: nothing is lost, and the client can see
the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.text.tools._text_cursor import TextSink
from quire.text.tools._value_parsers import JSON, PYTHON, escape_json, json_prefix, to_json
from quire.text.tools.base import MAX_SCHEMA_DEPTH, Tool

_INTEGER = re.compile(r"(-?[0-9]+)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NULL_WORDS = frozenset({"null", "none", "nil"})
_MAX_DIGITS = 1024

TEXT_TYPES = frozenset({"string"})
ANY_JSON = frozenset({"json"})
"""Schema type of a value that may be any JSON."""
JSON_OR_TEXT = frozenset({"json string"})
"""Of a value that is marked as JSON where the schema has a string: JSON's string, or text."""


def schema_types(tool: Tool | None, key: str) -> frozenset[str]:
    """Return the JSON types that the schema allows for a parameter; empty if unspecified."""
    if tool is None:
        return frozenset()
    return kinds_of_schema(inner_schema(tool.parameters, key, tool.parameters), tool.parameters)


def kinds_of_schema(schema: object, root: object) -> frozenset[str]:
    """Return the JSON types that a part of the schema `root` allows; empty if unspecified."""
    return _types_of_schema(schema, root if isinstance(root, Mapping) else {}, set(), 0)


def inner_schema(schema: object, key: str, root: object) -> object:
    """The schema of a property, or of the items if the schema has no properties."""
    for _ in range(MAX_SCHEMA_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not isinstance(root, Mapping):
            break
        schema = _resolve_reference(reference, root)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties", schema.get("items")) if found is None else found


def _types_of_schema(
    schema: object, root: Mapping[str, object], seen: set[str], depth: int
) -> frozenset[str]:
    """seen: references that were followed already; each is followed once."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
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
        return _types_of_schema(_resolve_reference(reference, root), root, seen, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, (list, tuple)):
            return frozenset().union(
                *(_types_of_schema(option, root, seen, depth + 1) for option in options)
            )
    return _types_of_values(schema)


def _types_of_values(schema: Mapping[str, object]) -> frozenset[str]:
    values = schema.get("enum")
    if isinstance(values, (list, tuple)):
        return frozenset(_type_of_value(value) for value in values)
    if "const" in schema:
        return frozenset({_type_of_value(schema["const"])})
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def _type_of_value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    return "object" if isinstance(value, Mapping) else "array"


def _resolve_reference(reference: str, root: Mapping[str, object]) -> object:
    """Return the schema that a reference within the schema names; None for any other."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def coerce_to_json(text: str, kinds: frozenset[str]) -> str:
    """A value of one of these kinds, as JSON; a string if it is none of them."""
    word = text.strip()
    if kinds in (ANY_JSON, JSON_OR_TEXT):
        found = to_json(word)
        if found is None or (kinds == JSON_OR_TEXT and not found.startswith('"')):
            return f'"{escape_json(text)}"'
        return found
    if "null" in kinds and word.lower() in _NULL_WORDS:
        return "null"
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower()
    if len(word) <= _MAX_DIGITS:
        if "integer" in kinds and (integer := _INTEGER.fullmatch(word)):
            return str(int(integer[1]))
        if "number" in kinds and _NUMBER.fullmatch(word):
            return word
    brackets = "{" * ("object" in kinds) + "[" * ("array" in kinds)
    if brackets and word[:1] in ("{", "[", "("):
        found = to_json(word, JSON) or to_json(word, PYTHON)
        if found is not None and found[0] in brackets:
            return found
    return f'"{escape_json(text)}"'


class ValueEmitter:
    """Emits a value as it streams in: at once if it can only be text, else when it is complete."""

    def __init__(self, emit: TextSink, kinds: frozenset[str], *, trim: bool = False) -> None:
        self._emit = emit
        self._kinds = kinds - {"string"}
        self._trim = trim
        self._parts: list[str] = []
        self._pending_newline = ""  # a newline that may belong to the closing tag
        self._started = False
        if not self._kinds:
            emit('"')

    def push(self, text: str) -> None:
        """Add text, which is not empty."""
        if self._trim:
            if not self._started:
                text = text.removeprefix("\n")
            self._started = True
            text = self._pending_newline + text
            self._pending_newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if not text:
            return
        if self._kinds:
            self._parts.append(text)
        else:
            self._emit(escape_json(text))

    def end(self) -> None:
        """The value is whole."""
        self._emit(coerce_to_json("".join(self._parts), self._kinds) if self._kinds else '"')

    def truncate(self) -> None:
        """The text ended here: emit the beginning of an object or array, nothing of a scalar."""
        text = "".join(self._parts)
        if not self._kinds.isdisjoint({"object", "array"}) and text.lstrip()[:1] in ("{", "["):
            self._emit(json_prefix(text))
