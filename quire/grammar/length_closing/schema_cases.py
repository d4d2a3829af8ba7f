"""Cases of a rewritten schema: subschemas that hold of one value together, without choices.

    SchemaCases(root).of((schema,)) -> list[Together]

Read by what computes lengths of texts (quire.grammar.length_closing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]
Together = tuple[Schema, ...]
"""Subschemas without allOf, anyOf and $ref that all hold of a value."""

MOST_CASES = 32
"""Of one value; above it the options of a choice are taken together."""
_CHOICES = ("allOf", "anyOf", "$ref", "$defs")


class SchemaCases:
    """The subschemas of one document, which quire.grammar.json_schema.rewrite wrote."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._plain: dict[int, Schema] = {}
        self._known: dict[tuple[int, ...], list[Together]] = {}

    def of(self, schemas: Together) -> list[Together]:
        """The cases of subschemas that all hold. Empty: no value is valid."""
        key = tuple(map(id, schemas))
        if key not in self._known:
            found = self._expanded(schemas, True)
            self._known[key] = (self._expanded(schemas, False) or []) if found is None else found
        return self._known[key]

    def _expanded(self, schemas: Together, is_exact: bool) -> list[Together] | None:
        """None: there are too many cases. Not exact: all options of a choice hold together."""
        waiting: list[tuple[list[Any], dict[int, Schema]]] = [([*schemas], {})]
        found: list[Together] = []
        while waiting:
            todo, held = waiting.pop()
            while todo:
                one = todo.pop()
                if one is False:
                    break
                if one is True or id(one) in held:
                    continue
                held[id(one)] = one  # in llguidance's order: itself, its reference, a choice, allOf
                todo += reversed(one.get("allOf", ()))
                target = [self._target(one["$ref"])] if "$ref" in one else []
                options = one.get("anyOf", ())
                if is_exact and options:
                    waiting += [
                        ([*todo, option, *target], dict(held)) for option in reversed(options)
                    ]
                    break
                todo += [*(option for option in options if option is not False), *target]
            else:
                found.append(tuple(self._without_choices(one) for one in held.values()))
            if len(found) + len(waiting) > MOST_CASES:
                return None
        return found

    def _without_choices(self, schema: Schema) -> Schema:
        if id(schema) not in self._plain:
            kept = {word: one for word, one in schema.items() if word not in _CHOICES}
            self._plain[id(schema)] = kept
        return self._plain[id(schema)]

    def _target(self, ref: str) -> Any:
        target = self.root
        for word in ref.lstrip("#").strip("/").split("/"):
            if word:
                name = word.replace("~1", "/").replace("~0", "~")
                target = target[int(name)] if isinstance(target, list) else target[name]
        return target


def types(case: Together) -> set[str]:
    """Types that all of them allow."""
    found = {"null", "boolean", "integer", "number", "string", "array", "object"}
    for one in case:
        given = one.get("type")
        if given is not None:
            listed = {given} if isinstance(given, str) else {*given}
            found &= listed | ({"integer"} if "number" in listed else set())
    return found


def value_lists(case: Together) -> list[Sequence[Any]]:
    """The constants that each of them lists, where they list some."""
    return [
        one["enum"] if "enum" in one else (one["const"],)
        for one in case
        if "enum" in one or "const" in one
    ]


def least(case: Together, word: str, default: float = 0) -> float:
    """The greatest lower bound."""
    return max((one[word] for one in case if word in one), default=default)


def most(case: Together, word: str) -> float:
    """The smallest upper bound."""
    return min((one[word] for one in case if word in one), default=math.inf)


def required(case: Together) -> list[str]:
    """Names of properties that must be there, in the order in which they are written."""
    needed = dict.fromkeys(name for one in case for name in one.get("required", ()))
    return [name for name in {**properties(case), **needed} if name in needed]


def properties(case: Together) -> dict[str, None]:
    """Names of listed properties, in order."""
    return dict.fromkeys(name for one in case for name in one.get("properties", ()))


def property_of(case: Together, name: str) -> tuple[Any, ...]:
    """Schemas of a property."""
    return tuple(
        one["properties"][name]
        if name in one.get("properties", ())
        else one.get("additionalProperties", True)
        for one in case
    )


def other_property(case: Together) -> tuple[Any, ...]:
    """Schemas of a property that is not listed."""
    return tuple(one.get("additionalProperties", True) for one in case)


def item_of(case: Together, place: int) -> tuple[Any, ...]:
    """Schemas of an item."""
    firsts = [one.get("prefixItems", ()) for one in case]
    return tuple(
        first[place] if place < len(first) else one.get("items", True)
        for one, first in zip(case, firsts)
    )
