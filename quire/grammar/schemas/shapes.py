"""What is left of a schema when its cases are told apart: sets of values, each of one kind.

A Key stands for all values that some Nodes allow and others forbid; its cases are Shapes, and a
value is allowed if it is of any one of them. Shapes of arrays and objects hold Keys for what is
within them, so that a schema that refers to itself is a finite graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from quire.grammar.automata import regex_ast
from quire.grammar.schemas.document import Node, Value

Signed = tuple[Node, bool]
"""A Node, and whether it is to hold or not to hold."""
Key = frozenset[Signed]
"""All of them at once. The empty Key is any value."""

FREE: Key = frozenset()
NEVER: Key = frozenset({(Node(-1, "", "", False), True)})


def is_never(key: Key) -> bool:
    """Something in it is false by name."""
    return any(sign and node.false for node, sign in key)


@dataclass(frozen=True, slots=True)
class AnyValue:
    """Every value."""


@dataclass(frozen=True, slots=True)
class Values:
    """These. Not empty."""

    values: tuple[Value, ...]
    place: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """An end of a range of numbers."""

    value: Fraction
    open: bool
    place: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """A range. step: multiples of it only; whole: integers."""

    whole: bool
    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Strings:
    """Of so many characters, matched by all patterns as a whole."""

    least: int = 0
    most: int | None = None
    patterns: tuple[regex_ast.RegexExpr, ...] = ()
    place: str = ""


@dataclass(slots=True)
class Array:
    """first: what the first items are; rest: the others. most: None means without end."""

    first: list[Key] = field(default_factory=list)
    rest: Key = FREE
    least: int = 0
    most: int | None = None
    place: str = ""

    def at(self, place: int) -> Key:
        """What stands at a place."""
        return self.first[place] if place < len(self.first) else self.rest


@dataclass(slots=True)
class Free:
    """Properties by any name that the pattern matches as a whole; None: by any name at all."""

    names: regex_ast.RegexExpr | None
    key: Key


@dataclass(slots=True)
class Object:
    """named: what may be there by name; free: by patterns that do not meet."""

    named: dict[str, Key] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    free: list[Free] = field(default_factory=list)
    least: int = 0
    most: int | None = None
    place: str = ""

    @property
    def optional(self) -> list[str]:
        """Names that may be left out, less those whose value nothing can be."""
        return [
            name
            for name, key in self.named.items()
            if name not in self.required and not is_never(key)
        ]


Shape = AnyValue | Values | Numbers | Strings | Array | Object
