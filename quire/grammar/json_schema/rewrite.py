"""Rewrites JSON Schema documents into the keywords that llguidance compiles exactly.

    rewrite(text, closed) -> str    raises UnsupportedSchema with the place

`oneOf` becomes `anyOf` where its options are disjoint or can be made so; `not`, `if` and
dependencies become choices; `format` becomes a pattern. Every value that the result allows is
valid under the document. Where a grammar cannot express a schema the result is narrower, and where
it can express no part of it the schema is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from quire.grammar.grammar_ast import JsonNode
from quire.grammar.json_schema import numbers, strings
from quire.grammar.json_schema.document import (
    Document,
    Subschema,
    UnsupportedSchema,
    pattern,
    refuse,
)
from quire.grammar.json_schema.overlap import Overlap
from quire.grammar.json_schema.values import (
    KINDS,
    NUMBERS,
    kind,
    kinds_of,
    listed,
    own_values,
    shared_kinds,
)

STEPS = 30_000
"""Subschemas of one document that may be written or compared."""
MOST_WAYS = 64
"""Choices that one keyword may become."""
MOST_TEXT = 1 << 21
"""Characters of the result."""
MOST_NEGATED = 4
"""References and choices within one negation."""
UNSUPPORTED = {
    "contains": ("array", "define each item in items"),
    "unevaluatedItems": ("array", "use items"),
    "unevaluatedProperties": ("object", "use additionalProperties"),
    "$dynamicRef": ("", "use $ref"),
    "$recursiveRef": ("", "use $ref"),
}
"""Keyword -> the type it is about, and what to write instead."""
NO_NEGATION = "a grammar cannot express what is not valid under this schema"

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
        self.overlap = Overlap(document, STEPS)
        self._names: dict[str, str] = {}
        self._waiting: deque[Subschema] = deque()
        self._endless: set[str] = set()
        """Places of definitions that need a value of the same definition, without end."""

    def whole(self) -> Written:
        """The root with the definitions that it refers to."""
        while True:
            self._names = {}
            root = self.positive(self.document.root, self.closed)
            made: dict[str, Written] = {}
            while self._waiting:
                part = self._waiting.popleft()
                made[self._names[part.place]] = self.positive(part, self.closed)
            endless = _endless(made)
            if not endless:
                return {**root, "$defs": made} if isinstance(root, dict) and made else root
            self._endless |= {place for place, name in self._names.items() if name in endless}

    # -- what is valid ----------------------------------------------------------------------

    def positive(self, part: Subschema, closed: bool) -> Written:
        """The subschema for llguidance. closed: as in rewrite, of this object."""
        self.overlap.spend(part)
        if isinstance(part.value, bool):
            return part.value
        kinds = kinds_of(part)
        if numbers.is_whole(part.get("multipleOf", 0.5)):
            kinds -= {"fraction"}  # llguidance writes no multiples as 2.0
        for word, (name, instead) in UNSUPPORTED.items():
            says = word == "contains" or part.get(word) not in (True, {})
            if word in part.value and says and (not name or name in kinds):
                refuse(part.at(word), f"{word} is not supported", instead)
        names = self._gathered(part) if closed else []
        made: dict[str, Any] = {}
        every: list[Written] = []
        values = listed(part)
        if values is not None:
            made["enum"] = values
        if part.get("type") is not None or kinds != kinds_of(part):
            made["type"] = _type_of(kinds)
        if kinds & NUMBERS:
            made |= numbers.written(part, whole="fraction" not in kinds)
        if "fraction" in kinds and (multiples := numbers.multiples(part)) is not None:
            del made["multipleOf"]  # llguidance comes to dead ends there
            every.append(_any_of([{"type": _type_of(KINDS - NUMBERS)}, {"enum": multiples}]))
        if "string" in kinds:
            made |= strings.written(part, every)
        if "array" in kinds:
            self._write_array(part, made)
        if "object" in kinds:
            self._write_object(part, made, every, names)
        every += self._applied(part, closed and not names)
        if {*made} == {"type"} and self._implied(part, kinds):
            made = {}
        return False if not kinds or values == [] else _all_of(made, every)

    def _implied(self, part: Subschema, kinds: frozenset[str]) -> bool:
        """What the subschema refers to allows no other types, so that its own `type` can go:
        llguidance merges no siblings into a reference that is recursive."""
        if "$ref" not in part.value:
            return False
        return shared_kinds(self.overlap.parts(self.document.target(part))) <= kinds

    def _applied(self, part: Subschema, closed: bool) -> Iterator[Written]:
        """Schemas that keywords apply to the same value."""
        if "$ref" in part.value:
            yield self._reference(self.document.target(part))
        for one in (*part.several("allOf"), *_conditions(part)):
            yield self.positive(one, closed)
        if "anyOf" in part.value:
            yield _any_of([self.positive(one, closed) for one in part.several("anyOf")])
        if "oneOf" in part.value:
            yield self._one_of(part, closed)
        barred = part.one("not")
        if barred is not None:
            ways = [*itertools.islice(self._negative(barred), MOST_WAYS)]
            if not ways and barred.value not in (True, {}):
                refuse(barred.place, NO_NEGATION)
            yield _any_of(ways)

    def _reference(self, target: Subschema) -> Written:
        if isinstance(target.value, bool) or target.place in self._endless:
            return target.value is True
        if target.place not in self._names:
            self._names[target.place] = f"d{len(self._names)}"
            self._waiting.append(target)
        return {"$ref": f"#/$defs/{self._names[target.place]}"}

    def _one_of(self, part: Subschema, closed: bool) -> Written:
        """anyOf of the options, each without the values of those that it overlaps."""
        options = [one for one in part.several("oneOf") if one.value is not False]
        allowed = kinds_of(part)
        made: list[Written] = []
        for one in options:
            parts = self.overlap.parts(one)
            kinds = allowed & shared_kinds(parts)
            needed = {name for inner in parts for name in inner.get("required", ())}
            others = [two for two in options if two is not one and self._meet(one, two, allowed)]
            every = [self.positive(one, closed)]
            for two in others:
                ways = (way for way in self._negative(two) if _fits(way, kinds, needed))
                every.append(_any_of([*itertools.islice(ways, max(1, 4 // len(others)))]))
            made.append(_all_of({}, every))
        found = _any_of(made)
        if found is False:
            refuse(
                part.at("oneOf"),
                "its options overlap, and a grammar cannot express where",
                "use anyOf, or give each option a property with a const of its own",
            )
        return found

    def _meet(self, one: Subschema, two: Subschema, kinds: frozenset[str]) -> bool:
        """Some value of these types may be valid under both options."""
        first, second = sorted((one, two), key=lambda given: given.place)
        return not self.overlap.disjoint(first, second, kinds)

    # -- arrays and objects -----------------------------------------------------------------

    def _write_array(self, part: Subschema, made: dict[str, Any]) -> None:
        first, rest = part.items()
        if first:
            made["prefixItems"] = [self.positive(one, self.closed) for one in first]
        if rest is not None:
            made["items"] = self.positive(rest, self.closed)
        for word in ("minItems", "maxItems"):
            if word in part.value:
                made[word] = int(part.value[word])

    def _write_object(
        self, part: Subschema, made: dict[str, Any], every: list[Written], names: list[str]
    ) -> None:
        """names: properties that are allowed where the subschema does not speak of others."""
        named = part.named("properties")
        properties = {name: self.positive(one, self.closed) for name, one in named.items()}
        rest = part.one("additionalProperties")
        others = True if rest is None else self.positive(rest, self.closed)
        patterns: dict[str, Written] = {}
        for given, one in part.named("patternProperties").items():
            node, wide = pattern(given, one.place), pattern(given, one.place, wide=True)
            if strings.is_writable_pattern(node):
                patterns[strings.anchored(node)] = self.positive(one, self.closed)
            if node != wide and (others is not False or named):  # names that dialects differ on
                unclear = strings.without(wide, node)
                if unclear is None:
                    refuse(one.place, "dialects of patterns differ on it", "use [...] for \\w, \\s")
                if strings.is_writable_pattern(unclear):
                    patterns[strings.anchored(unclear)] = False
        if names and rest is None and not patterns:
            properties = {**dict.fromkeys(names, True), **properties}
            others = False
        written = {"properties": properties, "patternProperties": patterns}
        made |= {word: value for word, value in written.items() if value or word in part.value}
        if others is not True:
            made["additionalProperties"] = others
        if part.get("required"):
            made["required"] = [*dict.fromkeys(part.value["required"])]
        if (of_names := part.one("propertyNames")) is not None:
            self._write_names(of_names, made)
        if "minProperties" in part.value or "maxProperties" in part.value:
            self._write_count(part, made, every)

    def _write_names(self, part: Subschema, made: dict[str, Any]) -> None:
        """propertyNames as properties or as a pattern of names."""
        parts = self.overlap.parts(part)
        words = {word for one in parts if isinstance(one.value, dict) for word in one.value}
        nodes = [n for one in parts for n in (*strings.nodes(one), *strings.lengths(one))]
        lists = [values for one in parts if (values := listed(one)) is not None]
        unsaid = words & {"anyOf", "oneOf", "not", "if"}
        if unsaid or "patternProperties" in made or (not lists and len(nodes) > 1):
            refuse(part.place, "only one pattern, length or enum of names is supported")
        if "string" not in shared_kinds(parts):
            lists, nodes = [[]], []
        if not lists and not nodes:
            return
        others = made.pop("additionalProperties", True)
        properties = made.setdefault("properties", {})
        if lists:
            good = [one for one in lists[0] if all(one in values for values in lists)]
            properties |= {name: others for name in good if name not in properties}
        else:
            good = []
            made["patternProperties"] = {strings.anchored(nodes[0]): others}
        for name in {*properties, *made.get("required", ())}:
            is_good = name in good if lists else True
            if not is_good or not all(strings.matches(node, name) for node in nodes):
                properties[name] = False
        made["additionalProperties"] = False

    def _write_count(self, part: Subschema, made: dict[str, Any], every: list[Written]) -> None:
        """minProperties and maxProperties as choices between sets of properties."""
        required, named = made.get("required", []), made.get("properties", {})
        optional = [name for name in named if named[name] is not False and name not in required]
        is_open = made.get("additionalProperties") is not False or "patternProperties" in made
        least = int(part.get("minProperties", 0))
        most = int(part.get("maxProperties", len(required) + len(optional)))
        missing, spare = least - len(required), most - len(required)
        ways: Iterator[Written]
        if missing > 0 and not optional and is_open:
            if missing > 1:
                refuse(part.at("minProperties"), "a grammar cannot count names that are not listed")
            made["minProperties"] = least
        elif missing > 0:
            ways = ({"required": [*one]} for one in itertools.combinations(optional, missing))
            every.append(_any_of([_without("object"), *itertools.islice(ways, MOST_WAYS)]))
        if spare < 0:
            every.append(_without("object"))
        elif "maxProperties" in part.value and not optional and is_open:
            made["maxProperties"] = most
        elif "maxProperties" in part.value:
            made["additionalProperties"] = False
            made.pop("patternProperties", None)
            dropped = itertools.combinations(optional, max(len(optional) - spare, 0))
            ways = ({"properties": dict.fromkeys(one, False)} if one else True for one in dropped)
            every.append(_any_of([*itertools.islice(ways, MOST_WAYS)]))

    def _gathered(self, part: Subschema) -> list[str]:
        """Names that a subschema with properties or allOf, and all that is applied beside it, give
        to properties. Empty: whatever it applies is closed by itself."""
        names: dict[str, None] = {}
        if not {"properties", "allOf"} & {*part.value}:
            return []
        for one in self.overlap.parts(part, ("allOf", "anyOf", "oneOf", "then", "else")):
            names |= dict.fromkeys(one.get("properties", ()))
        return [*names]

    # -- what is not valid ------------------------------------------------------------------

    def _negative(self, part: Subschema, depth: int = 0) -> Iterator[Written]:
        """Schemas of values that are not valid under the subschema: of some of them, or all."""
        self.overlap.spend(part)
        if part.value is False:
            yield True
        if isinstance(part.value, bool) or depth > MOST_NEGATED:
            return
        yield from self._unlike(part, depth)
        inner = [*part.several("allOf"), *_conditions(part)]
        for one in [self.document.target(part), *inner] if "$ref" in part.value else inner:
            yield from self._negative(one, depth + 1)
        for word in ("anyOf", "oneOf"):
            none = [self._other(one, depth) for one in part.several(word)]
            if none and False not in none:
                yield _all_of({}, none)
        barred = part.one("not")
        if barred is not None:
            yield self.positive(barred, False)

    def _other(self, part: Subschema, depth: int) -> Written:
        return _any_of([*itertools.islice(self._negative(part, depth + 1), 4)])

    def _unlike(self, part: Subschema, depth: int) -> Iterator[Written]:
        """Complements of the keywords of single types, one by one."""
        kinds = kinds_of(part)
        values = [*own_values(part)]
        if part.get("type") is not None or values:
            others = KINDS - kinds - ({"fraction"} if "integer" in kinds else set())
            if others:
                yield {"type": _type_of(others)}
        for one in values:
            yield from strings.not_of([value for value in one if isinstance(value, str)])
            yield from numbers.not_of([value for value in one if kind(value) in NUMBERS])
            flags = {value for value in one if isinstance(value, bool)}
            if len(flags) == 1:
                yield {"enum": [True not in flags]}
        if "object" in kinds:
            for name in part.get("required", ()):
                yield {"type": "object", "properties": {name: False}}
            for name, inner in part.named("properties").items():
                if (way := self._other(inner, depth)) is not False:
                    yield {"type": "object", "properties": {name: way}, "required": [name]}
        if kinds & NUMBERS:
            yield from numbers.outside(part)
        if "string" in kinds:
            yield from strings.not_matching(part)
        for name, word in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
            least, most = part.get(f"min{word}", 0), part.get(f"max{word}")
            if name in kinds and least and (name != "object" or least == 1):
                yield {"type": name, f"max{word}": int(least) - 1}
            if name in kinds and name != "object" and most is not None and most < 10_000:
                yield {"type": name, f"min{word}": int(most) + 1}
        first, rest = part.items()
        way = self._other(rest, depth) if rest is not None and not first else False
        if "array" in kinds and way is not False:
            yield {"type": "array", "prefixItems": [way], "minItems": 1}


def _conditions(part: Subschema) -> Iterator[Subschema]:
    """`if` and dependencies, in other keywords."""
    condition, then, other = part.one("if"), part.one("then"), part.one("else")
    if condition is not None and (then or other):
        yes = {"allOf": [condition, then or True]}
        no = {"allOf": [{"not": condition}, other or True]}
        yield part.child({"anyOf": [yes, no]}, "if", "")
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, wanted in part.named(word).items():
            is_names = isinstance(wanted.value, list)
            there = {"required": [name, *(wanted.value if is_names else ())]}
            ways = {"allOf": [there, True if is_names else wanted]}
            yield part.child({"anyOf": [{"properties": {name: False}}, ways]}, word, name, "")


def _endless(definitions: dict[str, Written]) -> set[str]:
    """Names of definitions of which no value has an end."""
    finite: set[str] = set()
    while found := {
        name for name, one in definitions.items() if name not in finite and _ends(one, finite)
    }:
        finite |= found
    return {*definitions} - finite


def _ends(schema: Written, finite: set[str]) -> bool:
    """Some value of the schema has an end, where values of these definitions have one."""
    if isinstance(schema, bool):
        return True
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    options = schema.get("anyOf")
    if options is not None and not any(_ends(one, finite) for one in options):
        return False
    if not all(_ends(one, finite) for one in schema.get("allOf", ())):
        return False
    inner: list[Written] = []
    if schema.get("type") == "object":
        others = schema.get("additionalProperties", True)
        named = schema.get("properties", {})
        inner = [named.get(name, others) for name in schema.get("required", ())]
    elif schema.get("type") == "array":
        first = [*schema.get("prefixItems", ()), schema.get("items", True)]
        inner = first[: schema.get("minItems", 0)]
    return all(_ends(one, finite) for one in inner)


def _type_of(kinds: frozenset[str]) -> list[str] | str:
    """Types of llguidance; numbers that are no integers have none of their own."""
    found = [str(one) for one in ("null", "boolean", "string", "array", "object") if one in kinds]
    if kinds & NUMBERS:
        found.append("number" if "fraction" in kinds else "integer")
    return found[0] if len(found) == 1 else found


def _without(name: str) -> Written:
    """Every value but those of a type."""
    return {"type": _type_of(KINDS - {name})}


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


def _fits(way: Written, kinds: frozenset[str], needed: set[str]) -> bool:
    """Some value of the complement may be of these types and have these properties."""
    if isinstance(way, bool):
        return way
    types = way.get("type")
    if types is not None and not kinds_of(Subschema({"type": types}, "", "")) & kinds:
        return False
    return not any(
        one is False and name in needed for name, one in way.get("properties", {}).items()
    )
