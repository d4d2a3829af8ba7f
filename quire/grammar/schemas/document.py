"""A schema as it was written: subschemas with their places, older spellings made new.

A Node is one subschema. Its keywords are checked when it is read (a Node never holds a keyword of
the wrong kind, and none that is not known), its references are followed when somebody asks. Every
Node is read once, so that Nodes are compared by identity. Read-only after that.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from quire.errors import RequestError
from quire.grammar.automata import regex_ast
from quire.grammar.schemas import formats

MOST_BYTES = 1_048_576
"""Of a schema's text."""
MOST_DEPTH = 64
"""Subschemas within subschemas."""
MOST_LEVELS = 256
"""Brackets within brackets, values of enum and examples included."""
MOST_SUBSCHEMAS = 5_000
"""Of a schema, those in definitions that nobody refers to not counted."""
MOST_PROPERTIES = 1_000
"""Of one subschema."""
MOST_VALUES = 5_000
"""Of one enum."""
MOST_BRANCHES = 200
"""Of one anyOf, oneOf or allOf."""
MOST_PATTERN = 4_096
"""Characters of a pattern."""
MOST_LENGTH = 100_000
"""A minLength, or a maxLength that is no plain upper bound."""
MOST_ITEMS = 10_000
"""A minItems, and a maxItems."""
MOST_PATTERNS = 16
"""patternProperties of one subschema."""

ONE = ("items", "contains", "not", "if", "then", "else", "additionalProperties", "propertyNames")
ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
NO_EFFECT = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "$comment"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"),
        *("$defs", "definitions", "xml", "externalDocs", "discriminator", "errorMessage"),
        *("markdownDescription", "enumNames", "enumDescriptions"),
    }
)
"""Say something to people, or to what resolves references. So do names that begin with x-."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DIALECTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")

Value = Any
"""JSON."""


class Node:
    """One subschema, read."""

    __slots__ = ("base", "key", "named", "number", "one", "place", "several", "source", "words")

    def __init__(self, number: int, place: str, base: str, source: dict[str, Value] | bool) -> None:
        self.number = number
        """Nodes in the order they were read."""
        self.place = place
        """JSON pointer."""
        self.base = base
        """The URI that its references are relative to."""
        self.source = source
        self.words: dict[str, Value] = {}
        """Keywords that hold no subschemas, in new spelling."""
        self.one: dict[str, Node] = {}
        self.several: dict[str, list[Node]] = {}
        self.named: dict[str, dict[str, Node]] = {}

    @property
    def false(self) -> bool:
        return self.source is False

    @property
    def plain(self) -> bool:
        """It allows everything: annotations only."""
        return not (self.false or self.words or self.one or self.several or self.named)

    @property
    def reference(self) -> bool:
        """It says nothing but $ref."""
        alone = len(self.words) == 1 and "$ref" in self.words
        return alone and not (self.one or self.several or self.named)

    def at(self, *steps: str | int) -> str:
        """The pointer of something within it."""
        return self.place + "".join(f"/{_escaped(str(step))}" for step in steps)

    def beside(self) -> Iterator[Node]:
        """Subschemas that judge the same value as this one, references not followed."""
        for word in ("not", "if", "then", "else"):
            if word in self.one:
                yield self.one[word]
        for word in ("allOf", "anyOf", "oneOf"):
            yield from self.several.get(word, ())
        yield from self.named.get("dependentSchemas", {}).values()


class Refused(RequestError):
    """A schema that cannot be had. place: JSON pointer of what is in the way."""

    def __init__(self, place: str, what: str, instead: str = "") -> None:
        at = f", at {place}" if place else ""
        super().__init__(f"the JSON schema{at}: {what}" + (f"; {instead}" if instead else ""))
        self.place = place


def refuse(place: str, what: str, instead: str = "") -> NoReturn:
    """Raise Refused."""
    raise Refused(place, what, instead)


class Document:
    """One schema text, and the Nodes that have been read of it."""

    def __init__(self, text: str) -> None:
        self.value = _loaded(text)
        self._known: dict[str, Node] = {}
        self._targets: dict[str, tuple[str, Value]] = {}
        self._dynamic: dict[str, int] = {}
        self._looked: set[Node] = set()
        self._name_targets(self.value, "", "", 0)
        self.root = self.read(self.value, "", "")

    # -- reading --------------------------------------------------------------------------------

    def read(self, value: Value, place: str, base: str, depth: int = 0) -> Node:
        """The Node of a place. Raises RequestError for a keyword that is unknown or malformed."""
        if place in self._known:
            return self._known[place]
        if not isinstance(value, dict | bool):
            refuse(place, f"a schema is an object, true or false, not {_shown(value)}")
        if depth > MOST_DEPTH:
            refuse(place, f"subschemas are nested over {MOST_DEPTH} deep", "use $ref and $defs")
        if len(self._known) >= MOST_SUBSCHEMAS:
            refuse(place, f"there are over {MOST_SUBSCHEMAS} subschemas")
        if isinstance(value, dict):
            base = urldefrag(_joined(base, _identity(value)))[0]
        node = self._known[place] = Node(len(self._known), place, base, value)
        if isinstance(value, dict):
            for word, given in value.items():
                self._keyword(node, word, given, depth)
            _renewed(node)
        return node

    def _keyword(self, node: Node, word: str, given: Value, depth: int) -> None:
        if word in NO_EFFECT or word.startswith("x-"):
            return _check_annotation(node, word, given)
        if word in ("additionalItems", "items") and isinstance(given, list):
            return self._read_several(node, "items", given, depth)
        if word in ONE or word in ONE_MORE or word == "additionalItems":
            node.one[word] = self.read(given, node.at(word), node.base, depth + 1)
        elif word in SEVERAL:
            self._read_several(node, word, given, depth)
        elif word in NAMED or word == "dependencies":
            self._read_named(node, word, given, depth)
        elif word in CHECKS:
            fault = CHECKS[word](given)
            if fault:
                refuse(node.at(word), f"{word} must be {fault}, not {_shown(given)}")
            self._checked_text(node, word, given)
            node.words[word] = given
        else:
            _refuse_unknown(node, word)

    def _checked_text(self, node: Node, word: str, given: Value) -> None:
        """Refuse patterns that no grammar can follow, and formats that are not known."""
        if word == "pattern":
            pattern(given, node.at(word))
        elif word == "format" and given not in formats.known():
            near = difflib.get_close_matches(given, formats.known(), n=1)
            hint = f"perhaps {near[0]!r} was meant" if near else "say what it is with pattern"
            refuse(node.at(word), f"the format {given!r} is not known here", hint)

    def _read_several(self, node: Node, word: str, given: Value, depth: int) -> None:
        limit = MOST_ITEMS if word in ("prefixItems", "items") else MOST_BRANCHES
        if not isinstance(given, list) or not given:
            refuse(node.at(word), f"{word} must be a list of schemas, not {_shown(given)}")
        if len(given) > limit:
            refuse(node.at(word), f"{word} has {len(given)} schemas; the limit is {limit}")
        node.several["prefixItems" if word == "items" else word] = [
            self.read(one, node.at(word, place), node.base, depth + 1)
            for place, one in enumerate(given)
        ]

    def _read_named(self, node: Node, word: str, given: Value, depth: int) -> None:
        if not isinstance(given, dict):
            refuse(node.at(word), f"{word} must be an object of schemas, not {_shown(given)}")
        limit = MOST_PATTERNS if word == "patternProperties" else MOST_PROPERTIES
        if len(given) > limit:
            refuse(node.at(word), f"{word} has {len(given)} names; the limit is {limit}")
        for name, one in given.items():
            place = node.at(word, name)
            if word == "dependencies" and isinstance(one, list):
                if _is_names(one):
                    refuse(place, f"a dependency must be {_is_names(one)}")
                node.words.setdefault("dependentRequired", {})[name] = one
                continue
            if word == "patternProperties":
                pattern(name, place)
            target = "dependentSchemas" if word == "dependencies" else word
            read = self.read(one, place, node.base, depth + 1)
            node.named.setdefault(target, {})[name] = read

    # -- references -----------------------------------------------------------------------------

    def target(self, node: Node) -> Node:
        """What the node's $ref names."""
        word = "$ref"
        given = node.words[word]
        uri, fragment = urldefrag(_joined(node.base, given))
        if uri and uri not in self._targets:
            refuse(
                node.at(_spelled(node)),
                f"it refers to {given!r}, which is outside of this schema and is never fetched",
                "put it into $defs",
            )
        place, value = self._targets[uri] if uri else ("", self.value)
        fragment = unquote(fragment)
        if fragment.startswith("/") or not fragment:
            place, value = self._pointed(node, place, value, fragment)
        elif f"{uri}#{fragment}" in self._targets:
            place, value = self._targets[f"{uri}#{fragment}"]
        else:
            refuse(node.at(_spelled(node)), f"nothing is named {given!r} in this schema")
        if _spelled(node) != "$ref" and self._dynamic.get(fragment, 0) > 1:
            refuse(
                node.at(_spelled(node)),
                f"{fragment!r} is a $dynamicAnchor in several places: what it means depends on "
                "the way that led here",
                "use $ref",
            )
        return self.read(value, place, uri)

    def _pointed(self, node: Node, place: str, value: Value, fragment: str) -> tuple[str, Value]:
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                given = node.words["$ref"]
                refuse(node.at(_spelled(node)), f"nothing stands at {given!r} in this schema")
            place += f"/{_escaped(name)}"
        return place, value

    def beside(self, node: Node) -> Iterator[Node]:
        """Subschemas that judge the same value as this one."""
        if "$ref" in node.words:
            yield self.target(node)
        yield from node.beside()

    def check_ends(self, start: Node) -> None:
        """Refuse a subschema that is among those that judge its own value: that never ends."""
        if start in self._looked:
            return
        path: dict[Node, None] = {start: None}
        stack = [(start, self.beside(start))]
        while stack:
            node, following = stack[-1]
            one = next(following, None)
            if one is None:
                stack.pop()
                del path[node]
                self._looked.add(node)
            elif one in path:
                refuse(one.place, "it refers to itself for one and the same value: without end")
            elif one not in self._looked:
                path[one] = None
                stack.append((one, self.beside(one)))

    def _name_targets(self, value: Value, place: str, base: str, depth: int) -> None:
        """Find what $id and anchors name. Values of enum, const and examples hold none."""
        if not isinstance(value, dict) or depth > 2 * MOST_DEPTH:
            return
        identity = _identity(value)
        if identity:
            base = urldefrag(_joined(base, identity))[0]
            self._targets.setdefault(base, (place, value))
        for word in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := value.get(word), str):
                self._targets.setdefault(f"{base}#{name}", (place, value))
                self._dynamic[name] = self._dynamic.get(name, 0) + (word == "$dynamicAnchor")
        if isinstance(old := value.get("$id", value.get("id")), str) and old.startswith("#"):
            self._targets.setdefault(f"{base}{old}", (place, value))
        for word, inner in value.items():
            here = f"{place}/{_escaped(word)}"
            for steps, one in _within(word, inner):
                self._name_targets(one, here + steps, base, depth + 1)


# -- reading, in small --------------------------------


def _loaded(text: str) -> Value:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MOST_BYTES:
        refuse("", f"it has {size} bytes; the limit is {MOST_BYTES}")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        refuse("", f"brackets are nested over {MOST_LEVELS} deep")
    except UnicodeEncodeError:
        refuse("", "it holds half a surrogate pair, which is no character")
    except ValueError as error:
        refuse("", f"it is no JSON: {error}")
    if _levels(value) > MOST_LEVELS:
        refuse("", f"brackets are nested over {MOST_LEVELS} deep")
    if not isinstance(value, dict | bool):
        refuse("", f"a schema is an object, true or false, not {_shown(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _levels(value: Value) -> int:
    levels, level = 0, [value]
    while level and levels <= MOST_LEVELS:
        levels += 1
        level = [
            one
            for outer in level
            if isinstance(outer, dict | list)
            for one in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return levels


def _within(word: str, inner: Value) -> Iterator[tuple[str, Value]]:
    """Subschemas under one keyword, with the rest of their pointers."""
    if word in ("$defs", "definitions", "dependencies", *NAMED) and isinstance(inner, dict):
        yield from ((f"/{_escaped(name)}", one) for name, one in inner.items())
    elif word in (*SEVERAL, "items") and isinstance(inner, list):
        yield from ((f"/{place}", one) for place, one in enumerate(inner))
    elif word in (*ONE, *ONE_MORE, "additionalItems"):
        yield "", inner


def _identity(value: dict[str, Value]) -> str:
    given = value.get("$id")
    return given if isinstance(given, str) and not given.startswith("#") else ""


def _joined(base: str, given: str) -> str:
    """urljoin knows no fragments of urn:."""
    return base + given if given.startswith("#") else urljoin(base, given)


def _renewed(node: Node) -> None:
    """Older and other spellings, in the words of draft 2020-12."""
    words = node.words
    for word in ("$dynamicRef", "$recursiveRef"):
        if word in words:
            if "$ref" in words:
                refuse(node.at(word), f"{word} beside $ref", "put one of them into allOf")
            words["$ref"] = words.pop(word)
    more = node.one.pop("additionalItems", None)
    if more is not None and "prefixItems" in node.several:
        node.one.setdefault("items", more)
    for old, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(words.get(old), bool) and words.pop(old) and bound in words:
            words[old] = words.pop(bound)
    _renew_type(node)


def _renew_type(node: Node) -> None:
    """OpenAPI's nullable, and type as a list."""
    words = node.words
    nullable = words.pop("nullable", False)
    if nullable and "type" not in words:
        refuse(node.at("nullable"), "nullable means nothing without type", 'use anyOf with "null"')
    if "type" in words:
        kinds = words["type"]
        listed = [kinds] if isinstance(kinds, str) else list(kinds)
        words["type"] = [*listed, "null"] if nullable and "null" not in listed else listed


def _spelled(node: Node) -> str:
    assert isinstance(node.source, dict), f"{node.place} is no object"
    return next(word for word in REFERENCES if word in node.source)


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _shown(value: Value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_unknown(node: Node, word: str) -> NoReturn:
    known = [*CHECKS, *ONE, *ONE_MORE, *SEVERAL, *NAMED, *NO_EFFECT]
    near = difflib.get_close_matches(word, known, n=1)
    refuse(
        node.at(word),
        f"{word!r} is no keyword of JSON Schema",
        f"perhaps {near[0]!r} was meant" if near else "names of your own begin with x-",
    )


def _check_annotation(node: Node, word: str, given: Value) -> None:
    """The few that a malformed one of would mislead."""
    if word == "$schema" and isinstance(given, str):
        if not any(dialect in given for dialect in DIALECTS):
            refuse(
                node.at(word), f"{given!r} is an unknown dialect", "draft 2020-12 is spoken here"
            )
    elif word in ("$defs", "definitions") and not isinstance(given, dict):
        refuse(node.at(word), f"{word} must be an object of schemas, not {_shown(given)}")


@functools.lru_cache(maxsize=512)
def _tree(given: str, wide: bool) -> regex_ast.RegexExpr:
    tree = regex_ast.without_anchors(regex_ast.parse_regex(given, wide))
    if regex_ast.text_lengths(tree) is None:
        raise RequestError("the regular expression matches no text")
    return tree


def pattern(given: str, place: str, wide: bool = False) -> regex_ast.RegexExpr:
    """The tree of a pattern, which matches the text as a whole. wide: as in regex.parse."""
    if len(given) > MOST_PATTERN:
        refuse(place, f"the pattern has {len(given)} characters; the limit is {MOST_PATTERN}")
    try:
        return _tree(given, wide)
    except RequestError as error:
        refuse(place, str(error))


# -- what keywords must be: None, or what they should have been --------------------------------


def _is_count(most: int) -> Callable[[Value], str | None]:
    def check(given: Value) -> str | None:
        whole = _number(given) and given == int(given) and given >= 0
        if not whole:
            return "a whole number, 0 or more"
        return f"at most {most}, which is the limit here" if given > most else None

    return check


def _number(given: Value) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _is_number(given: Value) -> str | None:
    return None if _number(given) else "a number"


def _is_bound(given: Value) -> str | None:
    return None if _number(given) or isinstance(given, bool) else "a number"


def _is_positive(given: Value) -> str | None:
    return None if _number(given) and given > 0 else "a number over 0"


def _is_text(given: Value) -> str | None:
    return None if isinstance(given, str) else "text"


def _is_bool(given: Value) -> str | None:
    return None if isinstance(given, bool) else "true or false"


def _is_names(given: Value) -> str | None:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        return "a list of names"
    if len(given) > MOST_PROPERTIES:
        return f"a list of at most {MOST_PROPERTIES} names"
    return None if len(set(given)) == len(given) else "a list of names, each once"


def _is_dependencies(given: Value) -> str | None:
    good = isinstance(given, dict) and not any(map(_is_names, given.values()))
    return None if good else "an object of lists of names"


def _is_types(given: Value) -> str | None:
    listed = [given] if isinstance(given, str) else given
    good = isinstance(listed, list) and listed and all(one in TYPES for one in listed)
    return None if good and _all_text(listed) else f"one or more of {', '.join(TYPES)}"


def _all_text(listed: Iterable[Value]) -> bool:
    return all(isinstance(one, str) for one in listed)


def _is_enum(given: Value) -> str | None:
    if not isinstance(given, list) or not given:
        return "a list of values, one at least"
    return None if len(given) <= MOST_VALUES else f"a list of at most {MOST_VALUES} values"


CHECKS: dict[str, Callable[[Value], str | None]] = {
    "type": _is_types,
    "enum": _is_enum,
    "const": lambda given: None,
    "nullable": _is_bool,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_bound,
    "exclusiveMaximum": _is_bound,
    "multipleOf": _is_positive,
    "minLength": _is_count(MOST_LENGTH),
    "maxLength": _is_count(2**53),
    "pattern": _is_text,
    "format": _is_text,
    "minItems": _is_count(MOST_ITEMS),
    "maxItems": _is_count(2**53),
    "minContains": _is_count(MOST_ITEMS),
    "maxContains": _is_count(2**53),
    "uniqueItems": _is_bool,
    "required": _is_names,
    "minProperties": _is_count(MOST_PROPERTIES),
    "maxProperties": _is_count(2**53),
    "dependentRequired": _is_dependencies,
    "$ref": _is_text,
    "$dynamicRef": _is_text,
    "$recursiveRef": _is_text,
}

__all__ = ["Document", "formats", "pattern", "refuse"]
