"""Schemas made at random: sensible ones of few names and small numbers, and broken ones."""

import copy
import json
import random

from quire.grammar.json_schema import lowering, strings
from quire.grammar.json_schema.document import Document

NAMES = ("a", "b", "c", "ab")
SIMPLE = (
    *(True, False, {}, {"const": 1}, {"enum": ["a", "b", 1]}, {"minimum": 2}, {"maxLength": 1}),
    *({"type": kind} for kind in ("integer", "string", "null", "boolean", "number")),
    *({"type": ["string", "integer"]}, {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}),
)
KINDS = ("integer", "string", "object", "array", "object", "array", "number", "null", "boolean")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains")
INNER = ("items", "contains", "additionalProperties", "not")
REST = ("unevaluatedProperties", "unevaluatedItems")
OF_NAMES = (
    *({"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 1}, {"minLength": 2}),
    {"not": {"const": "a"}},
)
STRANGE = (None, -1, 1.5, "x", "", [], {}, [[]], {"": {}}, True, 10**30, "\ud83d", "(", "#/$defs/z")


def enforced(given):
    """The schema without what is ignored: its validators take what grammars may allow."""
    lowered = lowering.Lowering(Document(json.dumps(given)))
    made = copy.deepcopy(given)
    places = {part.place: _at(made, part.place) for part in lowered.document.reached}
    for place, part in places.items():
        if not isinstance(part, dict):
            continue
        part.pop("uniqueItems", None)
        dropped = {word: part.pop(word, None) for word in lowered.unenforced.get(place, ())}
        if "if" in dropped:
            part.pop("then", None), part.pop("else", None)
        if dropped.get("oneOf"):
            part["allOf"] = [*part.get("allOf", ()), {"anyOf": dropped["oneOf"]}]
        for name in [*part.get("patternProperties", ())]:
            if not strings.is_readable(name):
                del part["patternProperties"][name]
    return made


def _at(made, place):
    for step in place.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        made = made[int(name)] if isinstance(made, list) else made[name]
    return made


def schema(draw: random.Random, depth: int = 3):
    """A schema that may mean something."""
    made = _schema(draw, depth)
    if isinstance(made, dict):
        made["$defs"] = {"x": _schema(draw, 1), "y": _schema(draw, 1)}
    return made


def _schema(draw, depth):
    if depth <= 0 or draw.random() < 0.1:
        return json.loads(json.dumps(draw.choice(SIMPLE)))
    made = {}
    for _ in range(draw.randint(1, 3)):
        made.update(draw.choice(KEYWORDS)(draw, depth))
    return made


def _inner(draw, depth, names):
    return {draw.choice(names): _schema(draw, depth - 1)}


def _named(draw, depth):
    names = draw.sample(NAMES, draw.randint(1, 3))
    return {"properties": {name: _schema(draw, depth - 1) for name in names}}


def _patterns(draw, depth):
    chosen = draw.sample(("^a", "b$", "^c$"), draw.randint(1, 2))
    return {"patternProperties": {one: _schema(draw, depth - 1) for one in chosen}}


def _several(draw, depth):
    word = draw.choice(("anyOf", "allOf", "oneOf", "prefixItems"))
    return {word: [_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _condition(draw, depth):
    words = [word for word in ("then", "else") if draw.random() < 0.7]
    return {word: _schema(draw, depth - 1) for word in ("if", *words)}


KEYWORDS = (
    lambda draw, depth: {"type": draw.choice(KINDS)},
    lambda draw, depth: {"type": draw.choice(KINDS)},
    lambda draw, depth: {"type": draw.sample(KINDS[:4], 2)},
    lambda draw, depth: {"enum": [value(draw, 2) for _ in range(draw.randint(1, 4))]},
    lambda draw, depth: {"const": value(draw, 2)},
    lambda draw, depth: {draw.choice(("minimum", "maximum")): draw.randint(-2, 4)},
    lambda draw, depth: {
        draw.choice(("exclusiveMinimum", "exclusiveMaximum")): draw.randint(-2, 4)
    },
    lambda draw, depth: {"multipleOf": draw.choice((1, 2, 3, 0.5))},
    lambda draw, depth: {draw.choice(COUNTS): draw.randint(0, 3)},
    lambda draw, depth: {draw.choice(COUNTS): draw.randint(0, 3)},
    lambda draw, depth: {draw.choice(("minProperties", "maxProperties")): draw.randint(0, 3)},
    lambda draw, depth: {"pattern": draw.choice(("^a", "b$", "a", "^[ab]*$", "^$"))},
    lambda draw, depth: {"uniqueItems": draw.random() < 0.5},
    lambda draw, depth: {"required": draw.sample(NAMES, draw.randint(1, 2))},
    lambda draw, depth: {"propertyNames": copy.deepcopy(draw.choice(OF_NAMES))},
    lambda draw, depth: {"dependentRequired": {draw.choice(NAMES): draw.sample(NAMES, 1)}},
    lambda draw, depth: {"dependentSchemas": {draw.choice(NAMES): _schema(draw, depth - 1)}},
    lambda draw, depth: _inner(draw, depth, INNER),
    lambda draw, depth: _inner(draw, depth, INNER),
    lambda draw, depth: _inner(draw, depth, REST),
    _named,
    _named,
    _patterns,
    _several,
    _several,
    _condition,
    lambda draw, depth: {"$ref": draw.choice(("#/$defs/x", "#/$defs/y"))},
)


def value(draw: random.Random, depth: int = 3):
    """A JSON value of the names and numbers that the schemas are about."""
    kind = draw.randrange(8 if depth > 0 else 6)
    if kind < 2:
        return draw.choice((None, True, False))
    if kind < 4:
        return draw.choice((-3, -1, 0, 1, 2, 3, 4, 0.5, 1.5, 2.0))
    if kind < 6:
        return draw.choice(("", "a", "b", "ab", "ba", "c", "aa", "bab", "abc"))
    if kind == 6:
        return [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    names = draw.sample((*NAMES, "d", "ba"), draw.randint(0, 3))
    return {name: value(draw, depth - 1) for name in names}


def broken(draw: random.Random, given):
    """The schema with some of it cut out, doubled, renamed or made into something strange."""
    places = list(_places(given))
    for _ in range(draw.randint(1, 3)):
        holder, key = draw.choice(places) if places else (None, None)
        if holder is None:
            return copy.deepcopy(draw.choice(STRANGE))
        what = draw.randrange(4)
        if what == 0:
            holder[key] = copy.deepcopy(draw.choice(STRANGE))
        elif what == 1:
            holder[key] = json.loads(json.dumps(draw.choice(places)[0]))
        elif what == 2 and isinstance(holder, dict) and key in holder:
            holder[key + draw.choice(("", "s", "x"))] = holder.pop(key)
        elif isinstance(holder, dict):
            word = draw.choice(("$ref", "not", "allOf", "items", "type", "enum"))
            holder[word] = copy.deepcopy(draw.choice(STRANGE))
        places = list(_places(given))
    return given


def _places(given, depth=0):
    if depth > 40 or not isinstance(given, dict | list):
        return
    pairs = given.items() if isinstance(given, dict) else enumerate(given)
    for key, one in list(pairs):
        yield given, key
        yield from _places(one, depth + 1)
