"""Rewrites JSON Schema documents into the keywords that llguidance compiles exactly.

    rewrite(text, closed) -> str    raises UnsupportedSchema with the place

`oneOf` becomes `anyOf` where its options are disjoint or can be made so; `not`, `if` and
dependencies become choices; `format` becomes a pattern. Every value that the result allows is
valid under the document. Where a grammar cannot express a schema the result is narrower, and where
it can express no part of it the schema is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from quire.grammar.automata.regex_ast import RegexAlternation, RegexExpr
from quire.grammar.grammar_ast import JsonNode
from quire.grammar.json_schema import numbers, strings
from quire.grammar.json_schema.document import (
    ANNOTATIONS,
    Document,
    Subschema,
    UnsupportedSchema,
    pattern,
    refuse,
)
from quire.grammar.json_schema.lowering import Lowering
from quire.grammar.json_schema.values import KINDS, NUMBERS, kinds_of, listed, type_of

MOST_STEPS = 30_000
"""Subschemas of one document that may be written."""
MOST_TEXT = 1 << 21
"""Characters of the result."""

Written = dict[str, Any] | bool


def rewrite(text: str, closed: bool = False) -> str:
    """The schema for llguidance, as JSON. Takes time: it runs in compile workers.

    closed: objects have no properties that the schema does not name, unless it allows others
    itself. Raises UnsupportedSchema.
    """
    try:
        made = SchemaWriter(Document(text), closed).whole()
    except RecursionError:
        refuse("", "its subschemas are nested too deeply")
    if made is False:
        refuse("", "it allows no value")
    dumped = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    if len(dumped) > MOST_TEXT:
        refuse("", f"it has over {MOST_TEXT} characters once its choices are written out")
    return dumped


def rewrite_node(node: JsonNode) -> JsonNode:
    """The node with its schema for llguidance. Raises UnsupportedSchema."""
    try:
        schema = rewrite(node.schema, node.closed)
    except UnsupportedSchema as error:
        raise UnsupportedSchema(error.place, error.reason, node.owner) from None
    return dataclasses.replace(node, schema=schema, closed=False, owner="")


class SchemaWriter:
    """Writes the subschemas of one document."""

    def __init__(self, document: Document, closed: bool) -> None:
        self.document = document
        self.closed = closed
        self.lowered = Lowering(document)
        self._names: dict[str, str] = {}
        self._waiting: deque[Subschema] = deque()
        self._steps = 0

    def whole(self) -> Written:
        """The root with the definitions that it refers to."""
        root = self.positive(self.document.root, self.closed)
        made: dict[str, Written] = {}
        while self._waiting:
            part = self._waiting.popleft()
            made[self._names[part.place]] = self.positive(part, self.closed)
        return {**root, "$defs": made} if isinstance(root, dict) and made else root

    def positive(self, part: Subschema, closed: bool, inlined: bool = False) -> Written:
        """The subschema for llguidance. closed: as in rewrite, of this object. inlined: something
        else applies to the same value."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            refuse(part.place, "the schema has too many cases", "ask for a simpler one")
        if isinstance(part.value, bool):
            return part.value
        ignored = self.lowered.unenforced.get(part.place, ())
        if ignored:
            kept = {word: one for word, one in part.value.items() if word not in ignored}
            part = Subschema(kept, part.place, part.base)
        kinds = kinds_of(part)
        if numbers.is_whole(part.get("multipleOf", 0.5)):
            kinds -= {"fraction"}  # llguidance writes no multiples as 2.0
        names = self._gathered(part) if closed else []
        made: dict[str, Any] = {}
        every: list[Written] = []
        values = listed(part)
        if values is not None:
            made["enum"] = values
        if part.get("type") is not None or kinds != kinds_of(part):
            made["type"] = type_of(kinds)
        if kinds & NUMBERS:
            made |= numbers.written(part, whole="fraction" not in kinds)
        if "fraction" in kinds and (multiples := numbers.multiples(part)) is not None:
            del made["multipleOf"]  # llguidance comes to dead ends there
            every.append(_any_of([{"type": type_of(KINDS - NUMBERS)}, {"enum": multiples}]))
        if "string" in kinds:
            made |= strings.written(part, every)
        if "array" in kinds:
            self._write_array(part, made)
        if "object" in kinds:
            self._write_object(part, made, names)
        every += self._applied(part, closed and not names, inlined or bool(made))
        return False if not kinds or values == [] else _all_of(made, every)

    def _applied(self, part: Subschema, closed: bool, inlined: bool) -> Iterator[Written]:
        """Schemas that keywords apply to the same value."""
        parts = [one for one in part.several("allOf") if one.place not in self.lowered.absorbed]
        choices = [part.several("anyOf")] if "anyOf" in part.value else []
        choices += [
            [part.child(one, "", at, way) for way, one in enumerate(choice)]
            for at, choice in enumerate(self.lowered.choices.get(part.place, ()))
        ]
        inlined |= len(parts) + len(choices) + ("$ref" in part.value) > 1
        if "$ref" in part.value:
            target = self.document.target(part)
            if inlined and self.document.is_recursive(target):
                yield self.positive(target, closed, inlined)  # llguidance merges no cycles
            else:
                yield self._reference(target)
        for one in parts:
            yield self.positive(one, closed, inlined)
        for options in choices:
            yield _any_of([self.positive(one, closed, inlined) for one in options])

    def _inner(self, part: Subschema) -> Written:
        """A subschema of another value."""
        if self._is_mixed(part, False):
            return self._reference(part)
        return self.positive(part, self.closed)

    def _reference(self, target: Subschema) -> Written:
        if isinstance(target.value, bool):
            return target.value
        if target.place not in self._names:
            self._names[target.place] = f"d{len(self._names)}"
            self._waiting.append(target)
        return {"$ref": f"#/$defs/{self._names[target.place]}"}

    def _is_mixed(self, part: Subschema, inlined: bool) -> bool:
        """Something recursive and something else apply to the same value: llguidance merges them
        only where the value is a definition of its own."""
        words = {*part.value} - ANNOTATIONS if isinstance(part.value, dict) else set()
        options = [one for choice in self.lowered.choices.get(part.place, ()) for one in choice]
        inner = [part.child(one, "", 0, at) for at, one in enumerate(options)]
        inner += [*part.several("allOf"), *part.several("anyOf")]
        inlined |= len(words) > 1 or len(part.several("allOf")) > 1
        if inlined and "$ref" in words and self.document.is_recursive(self.document.target(part)):
            return True
        return any(self._is_mixed(one, inlined) for one in inner)

    # -- arrays and objects -----------------------------------------------------------------

    def _write_array(self, part: Subschema, made: dict[str, Any]) -> None:
        first, rest = part.items()
        if first:
            made["prefixItems"] = [self._inner(one) for one in first]
        if rest is not None:
            made["items"] = self._inner(rest)
        for word in ("minItems", "maxItems"):
            if word in part.value:
                made[word] = int(part.value[word])

    def _write_object(self, part: Subschema, made: dict[str, Any], names: list[str]) -> None:
        """names: properties that are allowed where the subschema does not speak of others."""
        named = part.named("properties")
        properties = {name: self._inner(one) for name, one in named.items()}
        rest = part.one("additionalProperties")
        others = True if rest is None else self._inner(rest)
        patterns = self._write_patterns(part, others, properties)
        if names and rest is None and not patterns:
            properties = {**dict.fromkeys(names, True), **properties}
            others = False
        written = {"properties": properties, "patternProperties": patterns}
        made |= {word: value for word, value in written.items() if value or word in part.value}
        if others is not True:
            made["additionalProperties"] = others
        if part.get("required"):
            made["required"] = [*dict.fromkeys(part.value["required"])]
        if "propertyNames" in part.value:
            self._write_names(part, made)
        if self.lowered.optional_names(part) is None:
            for word in ("minProperties", "maxProperties"):
                if word in part.value:
                    made[word] = int(part.value[word])

    def _write_patterns(
        self, part: Subschema, others: Written, properties: dict[str, Written]
    ) -> dict[str, Written]:
        """patternProperties. Where two match one name, names of both have what either requires, and
        so have names that only some dialects match."""
        found: list[tuple[RegexExpr, list[Written]]] = []
        for given, one in part.named("patternProperties").items():
            if not strings.is_readable(given):
                continue
            node, wide = pattern(given, one.place), pattern(given, one.place, wide=True)
            every = [self._inner(one)]
            if node != wide:
                for name in properties:
                    if strings.matches(wide, name) is not False and not strings.matches(node, name):
                        properties[name] = _all_of({}, [properties[name], *every])
                unclear = None if isinstance(others, bool) else strings.without(wide, node)
                if unclear is not None:
                    _add_pattern(found, unclear, [False])
                elif others is not False:
                    node, every = wide, [*every, others]
            _add_pattern(found, node, every)
        return {strings.anchored(node): _all_of({}, every) for node, every in found}

    def _write_names(self, part: Subschema, made: dict[str, Any]) -> None:
        """propertyNames as properties or as a pattern of names."""
        rule = self.lowered.name_rule(part)
        assert rule is not None, part.place
        nodes = [n for one in rule.parts for n in (*strings.nodes(one), *strings.lengths(one))]
        if rule.names is None and not nodes:
            return
        others = made.pop("additionalProperties", True)
        properties = made.setdefault("properties", {})
        if rule.names is None:
            made["patternProperties"] = {strings.anchored(nodes[0]): others}
        else:
            properties |= {name: others for name in rule.names if name not in properties}
        for name in {*properties, *made.get("required", ())}:
            is_listed = rule.names is None or name in rule.names
            if not is_listed or not all(strings.matches(node, name) for node in nodes):
                properties[name] = False
        made["additionalProperties"] = False

    def _gathered(self, part: Subschema) -> list[str]:
        """Names that a subschema with properties or allOf, and all that is applied beside it, give
        to properties. Empty: whatever it applies is closed by itself."""
        names: dict[str, None] = {}
        if not {"properties", "allOf"} & {*part.value}:
            return []
        for one in self.lowered.parts(part, ("allOf", "anyOf", "oneOf", "then", "else")):
            names |= dict.fromkeys(one.get("properties", ()))
        return [*names]


def _add_pattern(
    found: list[tuple[RegexExpr, list[Written]]], node: RegexExpr, every: list[Written]
) -> None:
    """Add a pattern of names, united with those that may match one of its names."""
    for other in [*found]:
        if strings.may_meet(node, other[0]):
            found.remove(other)
            node, every = RegexAlternation((other[0], node)), [*other[1], *every]
    if strings.is_writable_pattern(node):
        found.append((node, every))


def _all_of(made: dict[str, Any], every: list[Written]) -> Written:
    """A schema that all must hold of."""
    if False in every:
        return False
    parts = [one for one in every if one is not True and one != {}]
    if not made and len(parts) == 1:
        return parts[0]
    if len(parts) == 1 and isinstance(parts[0], dict) and {*parts[0]} == {"anyOf"}:
        return {**made, **parts[0]}
    return {**made, "allOf": parts} if parts else made or True


def _any_of(options: list[Written]) -> Written:
    """A schema that one at least must hold of."""
    ways: list[Written] = []
    for one in options:
        if one is True or one == {}:
            return True
        if one is not False and one not in ways:
            ways.append(one)
    return False if not ways else ways[0] if len(ways) == 1 else {"anyOf": ways}
