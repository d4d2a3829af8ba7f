"""JSON Schema documents: reading, limits, references.

    Document(text).root -> Subschema     one subschema with its JSON pointer
    Document.target(part) -> Subschema   the subschema that its `$ref` names

The constructor checks every subschema that the root reaches, in linear time: values of keywords
have the right type and are within limits, references stay within the document. Keywords that JSON
Schema does not define are ignored, as its specification requires; a grammar cannot compare items,
so `uniqueItems` is ignored too. `Document.ignored` lists what is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from quire.core.param_checks import shown_json
from quire.errors import RequestError
from quire.grammar.automata import dfa
from quire.grammar.automata import regex_ast as regex
from quire.grammar.json_schema import formats

MOST_BYTES = 1_048_576
MOST_DEPTH = 64
"""Subschemas within subschemas."""
MOST_LEVELS = 256
"""Brackets within brackets, values of enum and examples included."""
MOST_SUBSCHEMAS = 10_000
"""Of a document; definitions that no reference reaches do not count."""
MOST_NAMES = 1_000
"""Of one `properties`, `required` and the like."""
MOST_LISTED = {"anyOf": 500, "oneOf": 500, "allOf": 500, "prefixItems": 10_000, "items": 10_000}
MOST_PATTERN = 4_096
"""Characters of a pattern."""

ONE = frozenset(
    {
        *("items", "additionalItems", "contains", "not", "if", "then", "else"),
        *("additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Keywords with a schema as value."""
NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords with an object of schemas as value."""
BESIDE = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"}
)
"""Keywords that apply schemas to the same value."""
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "$comment"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$defs", "definitions", "discriminator"),
    }
)
"""Keywords of the specification that allow every value."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

Value = Any
"""JSON."""


@dataclass(frozen=True, slots=True)
class Subschema:
    """One subschema of a document."""

    value: Value
    place: str
    """JSON pointer."""
    base: str
    """The URI that its references are relative to."""

    def get(self, word: str, default: Value = None) -> Value:
        """The value of a keyword."""
        return self.value.get(word, default) if isinstance(self.value, dict) else default

    def at(self, *steps: str | int) -> str:
        """The pointer of something within it."""
        escaped = (str(step).replace("~", "~0").replace("/", "~1") for step in steps)
        return "/".join((self.place, *escaped))

    def one(self, word: str) -> Subschema | None:
        """The schema under a keyword."""
        given = self.get(word)
        return None if given is None else self.child(given, word)

    def several(self, word: str) -> list[Subschema]:
        """The schemas of a list."""
        return [self.child(one, word, place) for place, one in enumerate(self.get(word, ()))]

    def named(self, word: str) -> dict[str, Subschema]:
        """The schemas of an object."""
        return {name: self.child(one, word, name) for name, one in self.get(word, {}).items()}

    def items(self) -> tuple[list[Subschema], Subschema | None]:
        """Schemas of the first items and of all others, in new spelling or old."""
        if isinstance(self.get("items"), list):
            return self.several("items"), self.one("additionalItems")
        return self.several("prefixItems"), self.one("items")

    def child(self, value: Value, *steps: str | int) -> Subschema:
        """A subschema of this one."""
        if isinstance(value, Subschema):  # of a schema that is made of others
            return value
        has_base = _identity(value) is not None and "$ref" not in value  # as drafts 4 to 7 have it
        base = _joined(self.base, _identity(value)) if has_base else self.base
        return Subschema(value, self.at(*steps), urldefrag(base)[0])


class UnsupportedSchema(RequestError):
    """A schema that is malformed or cannot be enforced. place: JSON pointer of the reason."""

    def __init__(self, place: str, reason: str, owner: str = "") -> None:
        schema = f"the JSON schema of {owner}" if owner else "the JSON schema"
        super().__init__(f"{schema}{f', at {place}' if place else ''}: {reason}")
        self.place, self.reason = place, reason


def refuse(place: str, what: str, instead: str = "") -> NoReturn:
    """Raise UnsupportedSchema. instead: what to write."""
    raise UnsupportedSchema(place, f"{what}; {instead}" if instead else what)


class Document:
    """One schema text, read and checked. Read-only after construction."""

    def __init__(self, text: str) -> None:
        self.ignored: set[str] = set()
        """Keywords and formats that are not enforced."""
        value = _loaded(text)
        self.root = Subschema(value, "", urldefrag(_joined("", _identity(value)))[0])
        self.reached: list[Subschema] = []
        """Every subschema that the root reaches; owners before what they hold."""
        self._inner: dict[str, list[Subschema]] = {}
        self._recursive: dict[str, bool] = {}
        self._named: dict[str, Subschema] = {}
        self._name_targets(self.root, 0)
        self._check_all()

    def target(self, part: Subschema) -> Subschema:
        """The subschema that `$ref` names. Raises UnsupportedSchema."""
        given = part.value["$ref"]
        uri, fragment = urldefrag(_joined(part.base, given))
        found = self._named.get(uri) if uri else self.root
        if found is None:
            refuse(
                part.at("$ref"),
                f"it refers to {shown_json(given)}, which is outside of this schema "
                "and is never fetched",
                "put it into $defs",
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"{uri}#{fragment}")
            return found or refuse(
                part.at("$ref"), f"the schema defines no anchor {shown_json(given)}"
            )
        inner = _at_pointer(found, fragment) or (
            uri == part.base and _at_pointer(self.root, fragment)
        )
        return inner or refuse(part.at("$ref"), f"the schema has nothing at {shown_json(given)}")

    def is_recursive(self, part: Subschema) -> bool:
        """A value of the subschema may hold another one of it."""
        if part.place not in self._recursive:
            seen: set[str] = set()
            waiting = [part]
            while waiting and part.place not in seen:
                for one in self._inner.get(waiting.pop().place, ()):
                    if one.place not in seen:
                        seen.add(one.place)
                        waiting.append(one)
            self._recursive[part.place] = part.place in seen
        return self._recursive[part.place]

    def _name_targets(self, part: Subschema, depth: int) -> None:
        """Find what `$id` and anchors name."""
        if not isinstance(part.value, dict) or depth > 2 * MOST_DEPTH:
            return
        if _identity(part.value) is not None:
            self._named.setdefault(part.base, part)
        for word in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = part.value.get(word)
            if isinstance(name, str) and (word.endswith("nchor") or name.startswith("#")):
                self._named.setdefault(f"{part.base}#{name.removeprefix('#')}", part)
        for word, inner in part.value.items():
            if isinstance(inner, dict) and (word in NAMED or word in ("$defs", "definitions")):
                within = [*part.named(word).values()]
            elif isinstance(inner, list) and word in MOST_LISTED:
                within = part.several(word)
            else:
                within = [part.child(inner, word)] if word in ONE else []
            for one in within:
                self._name_targets(one, depth + 1)

    def _check_all(self) -> None:
        """Check every subschema that the root reaches, and that none applies to itself."""
        beside: dict[str, list[str]] = {}
        waiting = [(self.root, 0)]
        while waiting:
            part, depth = waiting.pop()
            if part.place in beside:
                continue
            if len(beside) >= MOST_SUBSCHEMAS:
                refuse(part.place, f"there are over {MOST_SUBSCHEMAS} subschemas")
            if depth > MOST_DEPTH:
                refuse(part.place, f"subschemas are nested over {MOST_DEPTH} deep", "use $ref")
            if not isinstance(part.value, dict | bool):
                refuse(
                    part.place,
                    f"a schema is an object, true or false, not {shown_json(part.value)}",
                )
            self.reached.append(part)
            here = beside[part.place] = []
            inner = self._inner[part.place] = []
            if isinstance(part.value, bool):
                continue
            for word, given in part.value.items():
                found = self._checked(part, word, given)
                inner += found
                waiting += [(one, depth + 1) for one in found]
                here += [one.place for one in found if word in BESIDE]
            if part.get("$ref") is not None:
                inner.append(self.target(part))
                waiting.append((inner[-1], 0))
                here.append(inner[-1].place)
        _check_loops(beside)

    def _checked(self, part: Subschema, word: str, given: Value) -> list[Subschema]:
        """Check one keyword; the schemas within it."""
        if word in CHECKS:
            is_good, what = CHECKS[word]
            if not is_good(given):
                refuse(part.at(word), f"{word} must be {what}, not {shown_json(given)}")
            if word == "format" and given not in formats.KNOWN:
                self.ignored.add(f"format.{given}")
            elif word == "uniqueItems" and given:
                self.ignored.add(word)
            elif word == "$ref" and part.place and _identity(part.value) is not None:
                is_old = "draft-0" in str(self.root.get("$schema"))
                is_old or refuse(part.at("$id"), "drafts differ on what $id means beside $ref")
        elif word in MOST_LISTED and (word != "items" or isinstance(given, list)):
            if not isinstance(given, list) or not 0 < len(given) <= MOST_LISTED[word]:
                limits = f"1 to {MOST_LISTED[word]}"
                refuse(part.at(word), f"{word} must be a list of {limits} schemas")
            return part.several(word)
        elif word in ONE:
            return [part.child(given, word)]
        elif word in NAMED:
            if not isinstance(given, dict) or len(given) > MOST_NAMES:
                refuse(part.at(word), f"{word} must be an object of at most {MOST_NAMES} schemas")
            if word == "patternProperties" and len(max(given, key=len, default="")) > MOST_PATTERN:
                refuse(part.at(word), f"a pattern has at most {MOST_PATTERN} characters")
            is_list = word == "dependencies"
            return [one for one in part.named(word).values() if not (is_list and _names(one.value))]
        elif word not in ANNOTATIONS:
            self.ignored.add(word)
        return []


def _at_pointer(found: Subschema, pointer: str) -> Subschema | None:
    """What a JSON pointer leads to. In old drafts a subschema with an `$id` is no root of its own:
    callers try the document's root too."""
    for step in pointer.split("/")[1:]:
        name, inside = step.replace("~1", "/").replace("~0", "~"), found.value
        if isinstance(inside, dict) and name in inside:
            found = found.child(inside[name], name)
        elif isinstance(inside, list) and name.isdecimal() and int(name) < len(inside):
            found = found.child(inside[int(name)], name)
        else:
            return None
    return found


def _check_loops(beside: dict[str, list[str]]) -> None:
    """Refuse a schema that applies to its own value again. beside: places by place."""
    done: set[str] = set()
    for start in beside:
        path = {start: iter(beside[start])}
        while path:
            place, following = next(reversed(path.items()))
            one = next(following, None)
            if one is None:
                del path[place]
                done.add(place)
            elif one in path:
                refuse(one, "it refers to itself for one and the same value, without end")
            elif one not in done:
                path[one] = iter(beside[one])


def _loaded(text: str) -> Value:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MOST_BYTES:
        refuse("", f"it has {size} bytes; the limit is {MOST_BYTES}")
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        refuse("", f"brackets are nested over {MOST_LEVELS} deep")
    except UnicodeEncodeError:
        refuse("", "it holds half a surrogate pair, which is not a character")
    except ValueError as error:
        refuse("", f"it is no JSON: {error}")
    level: list[Any] = [[value]]
    for _ in range(MOST_LEVELS):
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for inner in inside for one in inner if isinstance(one, dict | list)]
    if level:
        refuse("", f"brackets are nested over {MOST_LEVELS} deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is no number here")
    return value


def _identity(value: Value) -> str | None:
    given = value.get("$id") if isinstance(value, dict) else None
    return given if isinstance(given, str) and not given.startswith("#") else None


def _joined(base: str, given: str | None) -> str:
    """urljoin drops fragments of urn:."""
    try:
        return base + (given or "") if (given or "#")[0] == "#" else urljoin(base, given or "")
    except ValueError:  # a malformed address
        return given or ""


def pattern(given: str, place: str, wide: bool = False) -> regex.RegexExpr:
    """The tree of a pattern, which matches the text as a whole. wide: as in parse_regex."""
    try:
        tree = dfa.parse_search(given, wide)
    except dfa.DfaTooComplex:
        refuse(place, "its look-ahead takes too many states")
    except RequestError as error:
        refuse(place, str(error))
    return refuse(place, "it matches no text") if regex.text_lengths(tree) is None else tree


def is_number(given: Value) -> bool:
    """An integer or a float, and no boolean."""
    return isinstance(given, int | float) and not isinstance(given, bool)


def _names(given: Value) -> bool:
    return isinstance(given, list) and all(isinstance(one, str) for one in given)


def _types(given: Value) -> bool:
    return given in TYPES or (_names(given) and bool(given) and all(one in TYPES for one in given))


Check = tuple[Callable[[Value], bool], str]


def _count(most: int) -> Check:
    def is_good(given: Value) -> bool:
        return is_number(given) and given == int(given) and 0 <= given <= most

    return is_good, f"a whole number from 0 to {most}, which is the limit here"


_NUMBER: Check = (is_number, "a number")
_BOUND: Check = (lambda given: isinstance(given, int | float), "a number")
_TEXT: Check = (lambda given: isinstance(given, str), "text")
_FLAG: Check = (lambda given: isinstance(given, bool), "true or false")
_DEPENDENCIES: Check = (
    lambda given: isinstance(given, dict) and all(map(_names, given.values())),
    "an object of lists of names",
)
CHECKS: dict[str, Check] = {
    "type": (_types, f"one or more of {', '.join(TYPES)}"),
    "enum": (lambda given: isinstance(given, list) and 0 < len(given) <= 5000, "1 to 5000 values"),
    "const": (lambda given: True, ""),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": (lambda given: is_number(given) and given > 0, "a number over 0"),
    "minLength": _count(100_000),
    "minItems": _count(10_000),
    "minProperties": _count(MOST_NAMES),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _count(2**53)),
    "required": (
        lambda given: _names(given) and len(given) <= MOST_NAMES,
        f"a list of at most {MOST_NAMES} names",
    ),
    "dependentRequired": _DEPENDENCIES,
    "pattern": (
        lambda given: isinstance(given, str) and len(given) <= MOST_PATTERN,
        f"a text of at most {MOST_PATTERN} characters",
    ),
    **dict.fromkeys(("format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    **dict.fromkeys(("nullable", "uniqueItems"), _FLAG),
}
"""Keyword -> whether a value is good, and what it must be."""
