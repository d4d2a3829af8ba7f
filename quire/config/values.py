"""Option values: parses sizes with suffixes, and any value by the type of its field.

`coerce` takes what a keyword, a YAML file or a command line gave, and returns the field's type
or raises ConfigError with the given value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from quire.errors import ConfigError

COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
BYTE_UNITS = (
    COUNT_UNITS
    | {"B": 1, "b": 1}
    | {
        f"{unit}{tail}": 10**power
        for unit, power in [("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12)]
        for tail in ("B", "b")
    }
    | {f"{unit}iB": 2**power for unit, power in [("K", 10), ("M", 20), ("G", 30), ("T", 40)]}
)
TRUE_WORDS, FALSE_WORDS = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def _sized(given: object, units: dict[str, int], what: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, float) and given.is_integer():
        return int(given)
    found = re.fullmatch(r"\s*(-?\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(given))
    if found is None or found[2] not in units:
        raise ValueError(what)
    size = float(found[1]) * units[found[2]]
    if found[2].isupper() and len(found[2]) == 1 and "." in found[1]:
        raise ValueError(f"{what} (K, M, G, T take whole numbers)")
    if "." not in found[1]:
        return int(found[1]) * units[found[2]]
    return int(size)


def count(given: object) -> int:
    """Parse a count: 8192, "8k" (thousands) or "8K" (1024s)."""
    return _sized(given, COUNT_UNITS, "a whole number, or one with k m g t or K M G T")


def size(given: object) -> int:
    """Parse bytes: a number, "24GiB", "24GB", "24G" (= GiB)."""
    return _sized(given, BYTE_UNITS, "a number of bytes, or one with KiB MiB GiB, KB MB GB")


PARSERS: dict[str, Callable[[object], int]] = {"count": count, "bytes": size}


def coerce(name: str, hint: Any, given: object, parse: str | None = None) -> Any:
    """Convert `given` to type `hint`, or raise ConfigError. Text is parsed by the type."""
    try:
        return _coerce(hint, given, parse)
    except (ValueError, TypeError) as e:
        allowed = str(e) if parse and not isinstance(hint, str) and str(e) else describe_type(hint)
        hint = _suggest(hint, given, parse)
        raise ConfigError(f"{name} must be {allowed}, got {given!r}{hint}") from None


def _suggest(hint: Any, given: object, parse: str | None) -> str:
    """Return what the text probably meant: a unit in other letters, a similar choice; else ""."""
    text = str(given).strip()
    number, unit = re.fullmatch(r"(.*?)([A-Za-z]*)", text, re.S).groups()  # type: ignore[union-attr]
    if parse is not None and number and unit:
        units = BYTE_UNITS if parse == "bytes" else COUNT_UNITS
        near = [f"{number}{one}" for one in units if one.lower() == unit.lower()]
    else:
        hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = [one for part in hints if get_origin(part) is Literal for one in get_args(part)]
        near = difflib.get_close_matches(text, map(str, choices), n=1)
    if near:
        return f"; did you mean {near[-1]}?"
    if text.startswith("{") and parse is None:
        try:
            json.loads(text)
        except ValueError as error:
            return f", which is not JSON: {error}"
    return ""


def describe_type(hint: Any) -> str:
    """Describe a type for users."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(x) for x in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(x) for x in get_args(hint))
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    plain = {
        NoneType: "None",
        dict: "a JSON object",
        list: "a list",
        Path: "a path",
        tuple: "a list",
    }
    origin = get_origin(hint) or hint
    return (words | plain).get(origin, "a function" if origin is Callable else str(hint))


def _coerce(hint: Any, given: object, parse: str | None) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _union(get_args(hint), given, parse)
    if origin is Literal:
        choices = get_args(hint)
        if given in choices and type(given) in {type(c) for c in choices}:
            return given
        raise ValueError
    reader = READERS.get(origin or hint)
    if reader is None:
        return given
    if hint is int and parse is not None:
        return PARSERS[parse](given)
    return reader(given)


def _union(hints: tuple[Any, ...], given: object, parse: str | None) -> Any:
    """Convert to the first of the types that accepts the value; narrow ones first, text last."""
    if NoneType in hints and (given is None or (isinstance(given, str) and given in ("", "None"))):
        return None
    problem = ""
    for hint in sorted(hints, key=_parse_priority):
        if hint is not NoneType:
            try:
                return _coerce(hint, given, parse)
            except (ValueError, TypeError) as e:
                problem = str(e) or problem
    raise ValueError(problem if parse else "") from None


def _parse_priority(hint: Any) -> int:
    """Rank a type by the text it accepts: exact values, numbers, containers, any text."""
    order: list[Any] = [Literal, bool, int, float, dict, tuple, list, str, Path]
    kind = get_origin(hint) or hint
    return order.index(kind) if kind in order else len(order)


def _bool(given: object) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in TRUE_WORDS + FALSE_WORDS:
        return given.lower() in TRUE_WORDS
    if given in (0, 1) and isinstance(given, int):
        return bool(given)
    raise ValueError


def _int(given: object) -> int:
    if isinstance(given, bool):
        raise TypeError
    if isinstance(given, str):
        return int(given)
    if isinstance(given, int) or (isinstance(given, float) and given.is_integer()):
        return int(given)
    raise ValueError


def _float(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise TypeError
    return float(given)


def _str(given: object) -> str:
    if isinstance(given, (str, Path)):
        return str(given)
    raise ValueError


def _dict(given: object) -> dict[str, Any]:
    value = json.loads(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise TypeError
    return dict(value)


def _tuple(given: object) -> tuple[Any, ...]:
    if isinstance(given, str):
        if given.startswith("["):
            return tuple(json.loads(given))
        return tuple(part.strip() for part in given.split(",") if part.strip())
    if isinstance(given, (list, tuple, set, frozenset)):
        if len(given) == 1 and str(next(iter(given))).startswith("["):
            return _tuple(next(iter(given)))  # a command line's ["a", "b"]
        return tuple(given)
    raise TypeError


def _function(given: object) -> object:
    if not callable(given):
        raise TypeError
    return given


READERS: dict[Any, Callable[[object], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    dict: _dict,
    tuple: _tuple,
    Callable: _function,
}
