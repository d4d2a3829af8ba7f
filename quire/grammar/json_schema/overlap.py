"""A sound check that two subschemas have no value in common.

    Overlap(document, steps).disjoint(one, two) -> bool

True is a proof; False means that none was found. The check follows references and reads types,
constants, patterns, bounds, counts, required properties and first items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.grammar.automata import dfa
from quire.grammar.json_schema import formats, numbers, strings
from quire.grammar.json_schema.document import Document, Subschema, Value, pattern, refuse
from quire.grammar.json_schema.values import KINDS, kind, own_values, shared_kinds, token

MOST_DEPTH = 6
"""Properties, items and options within each other that are compared."""
MOST_VALUES = 64
"""Constants that are held against a pattern."""


class Overlap:
    """Comparisons within one document, of bounded number."""

    def __init__(self, document: Document, steps: int) -> None:
        self.document = document
        self._left = steps
        self._known: dict[tuple[str, str, frozenset[str]], bool] = {}

    def spend(self, part: Subschema) -> None:
        """Count one step. Raises UnsupportedSchema when none is left."""
        self._left -= 1
        if self._left < 0:
            refuse(part.place, "the schema has too many cases", "ask for a simpler one")

    def parts(self, part: Subschema, words: Sequence[str] = ("allOf",)) -> list[Subschema]:
        """The subschema and all that these keywords and references apply beside it."""
        found: dict[str, Subschema] = {}
        waiting = [part]
        while waiting:
            one = waiting.pop()
            if one.place in found:
                continue
            self.spend(one)
            found[one.place] = one
            for word in words:
                inner = one.several(word) if isinstance(one.get(word), list) else [one.one(word)]
                waiting += [given for given in inner if given is not None]
            if one.get("$ref") is not None:
                waiting.append(self.document.target(one))
        return list(found.values())

    def disjoint(
        self, one: Subschema, two: Subschema, kinds: frozenset[str] = KINDS, depth: int = 0
    ) -> bool:
        """No value of these types is valid under both: proven."""
        key = (one.place, two.place, kinds)
        if key not in self._known:
            self._known[key] = False  # also the answer within itself
            self._known[key] = depth <= MOST_DEPTH and self._disjoint(one, two, kinds, depth)
        return self._known[key]

    def _disjoint(self, one: Subschema, two: Subschema, kinds: frozenset[str], depth: int) -> bool:
        self.spend(one)
        mine, others = self.parts(one), self.parts(two)
        shared = kinds & shared_kinds([*mine, *others])
        if all(self._differ(name, mine, others, depth) for name in shared):
            return True
        return any(
            all(self.disjoint(option, other, kinds, depth + 1) for option in part.several(word))
            for parts, other in ((mine, two), (others, one))
            for part in parts
            for word in ("anyOf", "oneOf")
            if part.get(word)
        )

    def _differ(
        self, name: str, mine: list[Subschema], others: list[Subschema], depth: int
    ) -> bool:
        """No value of the type is valid under both."""
        a, b = _values(mine, name), _values(others, name)
        if a is not None and b is not None:
            return not {token(one) for one in a} & {token(one) for one in b}
        if a is not None or b is not None:
            values, parts = (a, others) if a is not None else (b, mine)
            few = values is not None and len(values) <= MOST_VALUES
            return few and not any(_may_hold(one, parts) for one in values or ())
        if name in ("array", "object") and self._inside_differs(mine, others, depth):
            return True
        if name == "string" and _patterns_differ(mine, others):
            return True
        word = {"string": "Length", "array": "Items", "object": "Properties"}.get(name)
        if word is not None:
            ranges = [[numbers.counts(one, word) for one in group] for group in (mine, others)]
        else:
            ranges = [[numbers.range_of(one) for one in group] for group in (mine, others)]
        is_counted = name not in ("null", "boolean")
        return is_counted and any(not a.meets(b) for a in ranges[0] for b in ranges[1])

    def _inside_differs(self, mine: list[Subschema], others: list[Subschema], depth: int) -> bool:
        """Some property that one of them requires, or the first item, has no value for both."""
        needed = [name for part in (*mine, *others) for name in part.get("required", ())]
        first = any(part.get("minItems", 0) > 0 for part in (*mine, *others))
        for name in [*dict.fromkeys(needed), *([None] if first else ())]:
            given = [
                [part for one in group for part in _inner(one, name)] for group in (mine, others)
            ]
            if any(part.value is False for group in given for part in group):
                return True
            if any(self.disjoint(a, b, depth=depth + 1) for a in given[0] for b in given[1]):
                return True
        return False


def _inner(part: Subschema, name: str | None) -> Iterator[Subschema]:
    """Schemas of a property; None: of the first item."""
    if name is None:
        first, rest = part.items()
        yield from first[:1] or ([rest] if rest is not None else [])
        return
    named = part.get("properties", {})
    found = [part.child(named[name], "properties", name)] if name in named else []
    for given, one in part.named("patternProperties").items():
        is_match = strings.matches(pattern(given, one.place), name)
        if is_match is None or is_match != strings.matches(pattern(given, one.place, True), name):
            return
        found += [one] if is_match else []
    rest = part.one("additionalProperties")
    yield from found or ([rest] if rest is not None else [])


def _values(parts: list[Subschema], name: str) -> list[Value] | None:
    lists = [values for part in parts for values in own_values(part)]
    return [one for one in min(lists, key=len) if kind(one) == name] if lists else None


def _may_hold(value: Value, parts: list[Subschema]) -> bool:
    """The value may be valid under all of them."""
    if isinstance(value, str):
        nodes = [n for p in parts for n in (*strings.wide_nodes(p), *strings.lengths(p))]
        return all(strings.matches(node, value) is not False for node in nodes)
    if kind(value) in ("integer", "fraction"):
        return all(numbers.range_of(part).has(value) for part in parts)
    return True


def _patterns_differ(mine: list[Subschema], others: list[Subschema]) -> bool:
    named = [{part.get("format") for part in group} & formats.DISTINCT for group in (mine, others)]
    if all(named) and not named[0] & named[1]:
        return True
    nodes = [[n for part in group for n in strings.wide_nodes(part)] for group in (mine, others)]
    try:
        return any(not dfa.intersects(one, two) for one in nodes[0] for two in nodes[1])
    except dfa.DfaTooComplex:
        return False
