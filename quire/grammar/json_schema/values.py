"""JSON values as JSON Schema compares them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from quire.core.param_checks import shown_json
from quire.grammar.json_schema import numbers, strings
from quire.grammar.json_schema.document import Subschema, Value, is_number, refuse

NUMBERS = frozenset({"integer", "fraction"})
"""The two kinds of numbers: the type `number` is both."""
KINDS = NUMBERS | {"null", "boolean", "string", "array", "object"}


def kinds_of(part: Subschema) -> frozenset[str]:
    """Types that the subschema's own `type`, `const` and `enum` allow."""
    found = KINDS if part.value is not False else frozenset()
    given = part.get("type")
    if given is not None:
        names = {given} if isinstance(given, str) else {*given}
        names |= {"null"} if part.get("nullable") else set()
        found = frozenset(names | (NUMBERS if "number" in names else set())) & KINDS
    for values in own_values(part):
        found &= {kind(one) for one in values}
    return found


def kind(value: Value) -> str:
    """The type of a value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if is_number(value):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def token(value: Value) -> str:
    """Equal for values that JSON Schema calls equal."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value == int(value) else value


def own_values(part: Subschema) -> Iterable[list[Value]]:
    """The lists of `const` and `enum`."""
    if isinstance(part.value, dict):
        if "const" in part.value:
            yield [part.value["const"]]
        if "enum" in part.value:
            yield part.value["enum"]


def listed(part: Subschema) -> list[Value] | None:
    """The constants of a subschema that can be written. None: it lists none."""
    lists = [{token(value): value for value in values} for values in own_values(part)]
    if not lists:
        return None
    found = [value for key, value in lists[0].items() if all(key in one for one in lists)]
    return [value for value in found if _is_writable(value, part)]


def _is_writable(value: Value, part: Subschema) -> bool:
    """Refuse numbers of too many digits. False: the value has control characters."""
    if isinstance(value, dict):
        return all(_is_writable(one, part) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return all(_is_writable(one, part) for one in value)
    if is_number(value) and not numbers.read_exactly(value):
        word = "const" if "const" in part.value else "enum"
        refuse(part.at(word), f"the number {shown_json(value)} has too many digits", "use a string")
    return not isinstance(value, str) or strings.is_writable(value)


def type_of(kinds: frozenset[str]) -> list[str] | str:
    """Types of llguidance; numbers that are no integers have none of their own."""
    found = [str(one) for one in ("null", "boolean", "string", "array", "object") if one in kinds]
    if kinds & NUMBERS:
        found.append("number" if "fraction" in kinds else "integer")
    return found[0] if len(found) == 1 else found
