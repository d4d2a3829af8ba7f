"""Reads fields of a quantization's configuration. Whatever is not understood is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError

Json = Mapping[str, Any]

MAX_GROUP = 1 << 24
"""More inputs than any layer has: larger numbers would not fit those of kernels."""
MAX_WILDCARDS = 3
MAX_PATTERN_LENGTH = 256
_WILDCARD = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def require_value(key: str, value: object, *allowed: object) -> None:
    """Raise ConfigError if the field `key` has another value than those allowed.

    1, 1.0 and true are three values: what has the wrong type is no number of bits.
    """
    if not any(type(value) is type(one) and value == one for one in allowed):
        options = " or ".join(repr(one) for one in allowed)
        raise ConfigError(f"config.json: {key} is {value!r:.80}; supported: {options}")


def read_group_size(key: str, value: object, *special: object) -> int | None:
    """Return a number of inputs that share a scale; None for the special values."""
    if any(type(value) is type(one) and value == one for one in special):
        return None
    if type(value) is not int or not 0 < value <= MAX_GROUP:
        also = "".join(f" or {one!r}" for one in special)
        raise ConfigError(
            f"config.json: {key} is {value!r:.80}; it must be a number of inputs from 1 to "
            f"{MAX_GROUP}{also}"
        )
    return value


def read_object(key: str, value: object) -> Json:
    """Return the object `key`; empty if it is missing. Raises ConfigError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key} is {value!r:.80}; it must be an object")
    return value


def refuse_unknown(key: str, found: Json, known: frozenset[str]) -> None:
    """Raise ConfigError if the object `key` has fields that no reader understands."""
    if strange := sorted(found.keys() - known):
        raise ConfigError(
            f"config.json: {key} has fields that quire does not know: {', '.join(strange):.200}"
        )


def read_names(found: Json, key: str) -> tuple[str, ...]:
    """Return the layer names and patterns of a list; a missing one is empty."""
    given = found.get(key) or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"config.json: {key} is {given!r:.80}; it must be a list of names")
    names = tuple(given)
    for name in names:
        if name.startswith("re:"):
            check_pattern(name[3:], key)
    return names


def read_globs(found: Json, key: str) -> tuple[str, ...]:
    """The same of a list whose names may have * and ?, as patterns of layer rules."""
    return tuple(from_glob(name, key) for name in read_names(found, key))


def from_glob(name: str, key: str) -> str:
    """Return the pattern of a layer rule for a name that may have * and ?. Raises ConfigError."""
    if name.startswith("re:") or not {"*", "?"} & set(name):
        return name
    pattern = re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") + "$"
    check_pattern(pattern, key)
    return f"re:{pattern}"


def check_pattern(pattern: str, key: str, file: str = "config.json") -> None:
    """Raise ConfigError for a pattern that may match for ever: the file is untrusted."""
    wild = len(_WILDCARD.findall(pattern))
    if wild > MAX_WILDCARDS or _REPEATED_GROUP.search(pattern) or len(pattern) > MAX_PATTERN_LENGTH:
        why = (
            f"at most {MAX_WILDCARDS} of * + {{, none behind a group, "
            f"{MAX_PATTERN_LENGTH} characters"
        )
        raise ConfigError(f"{file}: {key} has the pattern {pattern!r:.80}; allowed: {why}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:  # the second: a{99999999999}
        raise ConfigError(f"{file}: {key} has the pattern {pattern!r:.80}: {error}") from None
