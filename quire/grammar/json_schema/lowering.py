"""Lowers keywords that a grammar lacks to choices between schemas of keywords that it has.

    Lowering(Document(text)).choices[place] -> list of choices, each a list of schemas
    Lowering(Document(text)).ignored        -> names of what is not enforced

`oneOf` becomes `anyOf` where its options are disjoint, or where each can leave out what another
requires; `not`, `if`, dependencies and counts of properties become choices. Whatever a schema
allows then is valid under the keyword. A keyword that cannot be lowered is ignored and named, as
are unknown ones. All this takes linear time, so that requests can be answered with the names
before a compile worker writes the schema.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.grammar.json_schema import formats, numbers, strings
from quire.grammar.json_schema.document import Document, Subschema, UnsupportedSchema
from quire.grammar.json_schema.values import (
    KINDS,
    NUMBERS,
    kind,
    kinds_of,
    listed,
    own_values,
    token,
    type_of,
)

MOST_WAYS = 64
"""Schemas that one keyword may become."""
MOST_COMBINED = 256
"""Combinations of all choices of one subschema: llguidance writes them out."""
MOST_NEGATED = 4
"""References and choices within one negation."""
MOST_DEPTH = 6
"""Properties and options within each other that are compared."""
MOST_COMPARED = 5_000
"""Pairs of options of one document that are compared."""
MOST_CACHED = 32_768
"""Characters of a schema whose check is cached: requests repeat schemas."""

Schema = Any
"""A schema as JSON, which may hold Subschemas."""
Choice = list[Schema]


def read_ignored(text: str) -> tuple[str, ...]:
    """Check a schema; the keywords and formats in it that are not enforced.

    Raises UnsupportedSchema.
    """
    found = (_ignored_cached if len(text) <= MOST_CACHED else _ignored)(text)
    if isinstance(found, UnsupportedSchema):
        raise UnsupportedSchema(found.place, found.reason)
    return found


def _ignored(text: str) -> tuple[str, ...] | UnsupportedSchema:
    try:
        return tuple(sorted(Lowering(Document(text)).ignored))
    except UnsupportedSchema as error:
        return error


_ignored_cached = functools.lru_cache(maxsize=256)(_ignored)


class Shape(NamedTuple):
    """What is known of all values of a subschema."""

    kinds: frozenset[str]
    values: frozenset[str] | None
    """Tokens of the constants it lists; None: it lists none."""
    required: frozenset[str]
    named: dict[str, list[Subschema]]
    only: frozenset[str] | None
    """Names that properties can have; None: any."""


class NameRule(NamedTuple):
    """What propertyNames requires: one of these names, and what these subschemas say of texts."""

    names: list[str] | None
    parts: list[Subschema]


class Lowering:
    """The choices of one document. Read-only after construction."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.ignored = {*document.ignored}
        """Keywords and formats that are not enforced."""
        self.unenforced: dict[str, set[str]] = {}
        """By the place of a subschema: its keywords that are not enforced."""
        self.choices: dict[str, list[Choice]] = {}
        """By the place of a subschema: what must hold beside its other keywords."""
        self.absorbed: set[str] = set()
        """Places of parts of allOf that the choices of their owner contain."""
        self._shapes: dict[str, Shape] = {}
        self._negated: dict[tuple[str, int], Choice] = {}
        self._compared = 0
        for part in document.reached:
            if isinstance(part.value, dict):
                self._lower(part)

    def parts(self, part: Subschema, words: tuple[str, ...] = ("allOf",)) -> list[Subschema]:
        """The subschema and all that these keywords and references apply beside it."""
        found: dict[str, Subschema] = {}
        waiting = [part]
        while waiting:
            one = waiting.pop()
            if one.place in found:
                continue
            found[one.place] = one
            for word in words:
                inner = one.several(word) if isinstance(one.get(word), list) else [one.one(word)]
                waiting += [given for given in inner if given is not None]
            if one.get("$ref") is not None:
                waiting.append(self.document.target(one))
        return list(found.values())

    def _lower(self, part: Subschema) -> None:
        made: list[tuple[str, Choice]] = []
        for word in part.value:
            lower = _LOWERED.get(word)
            choices = [] if lower is None else lower(self, part, word)
            if choices is None:
                self._ignore(part, word)
            else:
                made += [(word, choice) for choice in choices]
        if "if" in part.value or "allOf" in part.value:
            made += self._conditions(part)
        made.sort(key=lambda one: one[0] != "oneOf")
        while math.prod(len(choice) for _, choice in made) > MOST_COMBINED and len(made) > 1:
            word = made[-1][0]
            self._ignore(part, word)
            made = [(other, choice) for other, choice in made if other != word]
        if made:
            self.choices[part.place] = [choice for _, choice in made]

    def _ignore(self, part: Subschema, word: str) -> None:
        self.unenforced.setdefault(part.place, set()).add(word)
        self.ignored.add(word)

    # -- oneOf ------------------------------------------------------------------------------

    def _one_of(self, part: Subschema, word: str) -> list[Choice]:
        """The options; where two overlap each leaves out a name that the other requires. Where
        they cannot, the options as they are, which allows values that are valid under two."""
        options = [one for one in part.several(word) if one.value is not False]
        shapes = [self.shape(one) for one in options]
        allowed = kinds_of(part)
        kinds = [shape.kinds & allowed for shape in shapes]
        if all(shape.kinds == KINDS and (shape.required or shape.named) for shape in shapes):
            kinds = [one & {"object"} for one in kinds]  # other values are valid under all options
        barred: list[dict[str, bool]] = [{} for _ in options]
        for one, two in itertools.combinations(range(len(options)), 2):
            shared = kinds[one] & kinds[two]
            if not shared or self._disjoint(options[one], options[two], shared):
                continue
            needs, other_needs = shapes[one].required, shapes[two].required
            if shared != {"object"} or needs <= other_needs or other_needs <= needs:
                self._ignore(part, word)
                return [[*options]]
            barred[one][min(other_needs - needs)] = barred[two][min(needs - other_needs)] = False
        return [
            [
                {"type": type_of(kinds[at]), "properties": barred[at], "allOf": [one]}
                if barred[at] or kinds[at] != shapes[at].kinds & allowed
                else one
                for at, one in enumerate(options)
            ]
        ]

    def shape(self, part: Subschema, depth: int = 0) -> Shape:
        if part.place not in self._shapes:
            self._shapes[part.place] = self._shape(part, depth)
        return self._shapes[part.place]

    def _shape(self, part: Subschema, depth: int) -> Shape:
        kinds, values = KINDS, None
        required: set[str] = set()
        named: dict[str, list[Subschema]] = {}
        only: frozenset[str] | None = None
        for one in self.parts(part):
            barred = one.get("not")
            if (
                isinstance(barred, dict)
                and {*barred} == {"required"}
                and len(barred["required"]) == 1
            ):
                named.setdefault(barred["required"][0], []).append(one.child(False, "not"))
            kinds &= kinds_of(one)
            for constants in own_values(one):
                values = _both(values, frozenset(map(token, constants)))
            required.update(one.get("required", ()))
            for name, inner in one.named("properties").items():
                named.setdefault(name, []).append(inner)
            if one.get("additionalProperties") is False and not one.get("patternProperties"):
                only = _both(only, frozenset(one.get("properties", ())))
            for word in ("anyOf", "oneOf") if depth < MOST_DEPTH else ():
                inside = [self.shape(option, depth + 1) for option in one.several(word)]
                if not inside:
                    continue
                kinds &= frozenset().union(*(option.kinds for option in inside))
                required |= frozenset.intersection(*(option.required for option in inside))
                lists = [option.values for option in inside if option.values is not None]
                if len(lists) == len(inside):
                    values = _both(values, frozenset().union(*lists))
        return Shape(kinds, values, frozenset(required), named, only)

    def _disjoint(
        self, one: Subschema, two: Subschema, kinds: frozenset[str] = KINDS, depth: int = 0
    ) -> bool:
        """No value of these types is valid under both: proven."""
        self._compared += 1
        if depth > MOST_DEPTH or self._compared > MOST_COMPARED:
            return False
        a, b = self.shape(one), self.shape(two)
        shared = a.kinds & b.kinds & kinds
        if not shared:
            return True
        if a.values is not None and b.values is not None:
            return not a.values & b.values
        if shared == {"object"}:
            for name in a.required | b.required:
                if any(given.only is not None and name not in given.only for given in (a, b)):
                    return True
                mine, others = a.named.get(name, ()), b.named.get(name, ())
                if any(inner.value is False for inner in (*mine, *others)):
                    return True
                if any(self._disjoint(x, y, depth=depth + 1) for x in mine for y in others):
                    return True
        return any(
            all(self._disjoint(option, other, kinds, depth + 1) for option in given.several(word))
            for given, other in ((one, two), (two, one))
            for word in ("anyOf", "oneOf")
            if given.get(word)
        )

    # -- not, if, dependencies --------------------------------------------------------------

    def _not(self, part: Subschema, _: str) -> list[Choice] | None:
        barred = part.child(part.value["not"], "not")
        ways = [way for way in self.negated(barred) if kinds_of(part.child(way)) & kinds_of(part)]
        return [ways] if ways or barred.value in (True, {}) else None

    def negated(self, part: Subschema, depth: int = 0) -> Choice:
        """Schemas of values that are not valid under the subschema: of some of them, or all."""
        if isinstance(part.value, bool) or depth > MOST_NEGATED:
            return [True] if part.value is False else []
        key = (part.place, depth)
        if key not in self._negated:
            self._negated[key] = []
            found = [*self._unlike(part, depth)]
            inner = [*part.several("allOf")]
            if "$ref" in part.value:
                inner.append(self.document.target(part))
            for one in inner:
                found += self.negated(one, depth + 1)
            for word in ("anyOf", "oneOf"):
                none = [self.negated(one, depth + 1)[:4] for one in part.several(word)]
                if none and all(none):
                    found.append({"allOf": [_any_of(ways) for ways in none]})
            barred = part.one("not")
            if barred is not None:
                found.append(barred)
            self._negated[key] = found[:MOST_WAYS]
        return self._negated[key]

    def _unlike(self, part: Subschema, depth: int) -> Iterator[Schema]:
        """Complements of the keywords of single types, one by one."""
        kinds = kinds_of(part)
        values = [*own_values(part)]
        others = KINDS - kinds - ({"fraction"} if "integer" in kinds else set())
        if others and (part.get("type") is not None or values):
            yield {"type": type_of(others)}
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
                if ways := self.negated(inner, depth + 1)[:4]:
                    way = {"properties": {name: _any_of(ways)}, "required": [name]}
                    yield {"type": "object", **way}

    def _conditions(self, part: Subschema) -> Iterator[tuple[str, Choice]]:
        """`if` of the subschema and of the parts of its allOf. Those that compare one property
        with constants become one choice between its values."""
        switches: dict[str, list[Case]] = {}
        for one in (part, *part.several("allOf")):
            given = one.one("if")
            if given is None or not {"then", "else"} & {*one.value}:
                continue
            if one is not part and not {*one.value} <= {"if", "then", "else", "$comment"}:
                continue
            case = self._case(one, given)
            if case is not None:
                switches.setdefault(case.name, []).append(case)
            elif one is part:
                ways = self.negated(given)
                if not ways and given.value not in (True, {}):
                    self._ignore(part, "if")
                    continue
                yes = {"allOf": [given, one.one("then") or True]}
                no = {"allOf": [_any_of(ways), one.one("else") or True]}
                yield "if", [yes, no]
        for cases in switches.values():
            if len(cases) == 1 and cases[0].part is not part:
                continue
            self.absorbed |= {case.part.place for case in cases if case.part is not part}
            yield "if", [*self._switch(part, cases)]

    def _case(self, part: Subschema, given: Subschema) -> Case | None:
        words = {*given.value} if isinstance(given.value, dict) else set()
        named = given.get("properties")
        if not words <= {"properties", "required", "type"} or not named or len(named) != 1:
            return None
        ((name, inner),) = named.items()
        if not isinstance(inner, dict) or not {*inner} <= {"const", "enum", "type"}:
            return None
        values = listed(given.child(inner, "properties", name))
        if values is None or "type" in inner or not {*given.get("required", ())} <= {name}:
            return None
        if given.get("type", "object") != "object":
            return None
        return Case(part, name, values, bool(given.get("required")), "type" in words)

    def _switch(self, part: Subschema, cases: list[Case]) -> Iterator[Schema]:
        """One schema for each group of values of the property, for others, and without it."""
        name = cases[0].name
        groups: dict[tuple[bool, ...], dict[str, Any]] = {}
        for value in (value for case in cases for value in case.values):
            key = token(value)
            held = tuple(key in map(token, case.values) for case in cases)
            groups.setdefault(held, {})[key] = value
        every = {key: value for group in groups.values() for key, value in group.items()}
        for held, group in groups.items():
            inner = {"properties": {name: {"enum": [*group.values()]}}, "required": [name]}
            yield _applied({"type": "object", **inner}, cases, held)
        place = cases[0].part.at("if", "", name)
        rest = self.negated(Subschema({"enum": [*every.values()]}, place, ""))
        inner = {"properties": {name: _any_of(rest)}, "required": [name]}
        yield _applied({"type": "object", **inner}, cases, [False] * len(cases))
        if name not in part.get("required", ()):
            absent = {"type": "object", "properties": {name: False}}
            yield _applied(absent, cases, [not case.is_required for case in cases])
        if kinds_of(part) != {"object"}:
            others = {"type": type_of(KINDS - {"object"})}
            yield _applied(others, cases, [not case.is_typed for case in cases])

    def _dependencies(self, part: Subschema, word: str) -> list[Choice]:
        found: list[Choice] = []
        for name, wanted in part.named(word).items():
            is_names = isinstance(wanted.value, list)
            there = {"required": [name, *(wanted.value if is_names else ())]}
            with_it = there if is_names else {**there, "allOf": [wanted]}
            found.append([{"properties": {name: False}}, with_it])
        return found

    # -- counts and names -------------------------------------------------------------------

    def optional_names(self, part: Subschema) -> list[str] | None:
        """Listed properties that need not be there. None: there are none, and others may be there,
        which llguidance counts: it allows one name twice, so of a least count only the first."""
        named = part.get("properties", {})
        found = [one for one in named if named[one] is not False and one not in _required(part)]
        is_open = part.get("additionalProperties") is not False or part.get("patternProperties")
        return None if is_open and not found else found

    def _counts(self, part: Subschema, word: str) -> list[Choice] | None:
        """minProperties and maxProperties as choices between sets of listed properties."""
        required, optional = _required(part), self.optional_names(part)
        least = int(part.get("minProperties", 0)) - len(required)
        most = part.get("maxProperties", math.inf) - len(required)
        if optional is None:
            return [] if word == "maxProperties" or least <= 1 else None
        is_exact = least == most
        is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
        if word == "minProperties":
            sets = _sets(optional, least) if least <= len(optional) else [] if is_closed else None
            if sets is None:
                return None
            ways: Choice = [{"required": [*one]} for one in sets]
            return [] if least <= 0 or is_exact else [[_NO_OBJECT, *ways]]
        if is_closed and most >= len(optional):
            return []
        sets = _sets(optional, most)
        if sets is None or (is_exact and least > len(optional)):
            return None
        ways = []
        for one in sets:
            names = dict.fromkeys((*required, *one), True)
            needed = {"required": [*names]} if is_exact else {}
            ways.append({"properties": names, "additionalProperties": False, **needed})
        return [[_NO_OBJECT, *ways]]

    def name_rule(self, part: Subschema) -> NameRule | None:
        """What propertyNames of a subschema requires. None: it cannot be enforced."""
        parts = self.parts(part.child(part.value["propertyNames"], "propertyNames"))
        words = {word for one in parts if isinstance(one.value, dict) for word in one.value}
        patterns = [one.value["pattern"] for one in parts if one.get("pattern") is not None]
        if {"anyOf", "oneOf", "not", "if"} & words or part.get("patternProperties"):
            return None
        if not all(map(strings.is_readable, patterns)):
            return None
        if "string" not in frozenset.intersection(*map(kinds_of, parts)):
            return NameRule([], [])
        num_rules = len(patterns) + sum(len(strings.lengths(one)) for one in parts)
        num_rules += sum(formats.node(one.get("format", "")) is not None for one in parts)
        lists = [values for one in parts if (values := listed(one)) is not None]
        lists = [[one for one in values if isinstance(one, str)] for values in lists]
        if num_rules > 1 and not lists:
            return None
        names = [one for one in lists[0] if all(one in two for two in lists)] if lists else None
        return NameRule(names, parts)

    def _unevaluated(self, part: Subschema, word: str) -> list[Choice] | None:
        """unevaluatedProperties beside what applies in any case and lists all its names."""
        parts = self.parts(part)
        words = {word for one in parts if isinstance(one.value, dict) for word in one.value}
        if part.value[word] in (True, {}) or "object" not in kinds_of(part):
            return []
        if part.value[word] is not False or words & _EVALUATING:
            return None
        names = dict.fromkeys((name for one in parts for name in one.get("properties", ())), True)
        return [[{"properties": names, "additionalProperties": False}]]

    def _patterns(self, part: Subschema, word: str) -> list[Choice]:
        """Those that cannot be followed are left out: names that match them are other names."""
        if not all(map(strings.is_readable, part.value[word])):
            self.ignored.add(word)
        return []


class Case(NamedTuple):
    """An `if` that compares one property with constants."""

    part: Subschema
    name: str
    values: list[Any]
    is_required: bool
    is_typed: bool
    """It does not hold of values that are no objects."""


def _applied(made: Schema, cases: list[Case], held: Any) -> Schema:
    """A schema with what the cases apply where they hold, and where they do not."""
    every = [case.part.one("then" if is_held else "else") for case, is_held in zip(cases, held)]
    every = [one for one in every if one is not None]
    return {**made, "allOf": every} if every else made


def _required(part: Subschema) -> list[str]:
    return [*dict.fromkeys(part.get("required", ()))]


def _sets(names: list[str], count: float) -> list[tuple[str, ...]] | None:
    """All sets of so many of the names, or of all; none for a negative count. None: too many."""
    if count < 0:
        return []
    size = int(min(count, len(names)))
    if math.comb(len(names), size) > MOST_WAYS:
        return None
    return [*itertools.combinations(names, size)]


def _both(one: frozenset[str] | None, two: frozenset[str]) -> frozenset[str]:
    return two if one is None else one & two


def _any_of(ways: Choice) -> Schema:
    return ways[0] if len(ways) == 1 else {"anyOf": ways} if ways else False


_NO_OBJECT = {"type": type_of(KINDS - {"object"})}


def _unless(kinds: frozenset[str]) -> Callable[[Lowering, Subschema, str], list[Choice] | None]:
    """A keyword that is not enforced of these types."""

    def lower(_: Lowering, part: Subschema, word: str) -> list[Choice] | None:
        says = part.value[word] is not True and part.value[word] != {}
        return None if kinds & kinds_of(part) and (says or word == "contains") else []

    return lower


_EVALUATING = {
    *("anyOf", "oneOf", "if", "dependencies", "dependentSchemas"),
    *("patternProperties", "additionalProperties", "$dynamicRef", "$recursiveRef"),
}
"""Keywords that may list names of properties for some values only, or others."""
_ARRAYS = _unless(frozenset({"array"}))
_LOWERED: dict[str, Callable[[Lowering, Subschema, str], list[Choice] | None]] = {
    "oneOf": Lowering._one_of,
    "not": Lowering._not,
    **dict.fromkeys(
        ("dependencies", "dependentRequired", "dependentSchemas"), Lowering._dependencies
    ),
    **dict.fromkeys(("minProperties", "maxProperties"), Lowering._counts),
    "propertyNames": lambda self, part, _: None if self.name_rule(part) is None else [],
    "patternProperties": Lowering._patterns,
    "pattern": lambda self, part, _: [] if strings.is_readable(part.value["pattern"]) else None,
    "multipleOf": lambda self, part, _: None if numbers.step(part) is None else [],
    **dict.fromkeys(("contains", "unevaluatedItems"), _ARRAYS),
    "unevaluatedProperties": Lowering._unevaluated,
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), _unless(KINDS)),
}
"""Keyword -> its choices; None where it is not enforced."""
