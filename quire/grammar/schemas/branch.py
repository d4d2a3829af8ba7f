"""One case of a Key while it is being taken apart: what is known to hold in it.

A Branch takes Nodes in one by one. What a keyword says becomes a fact; where it leaves a choice
(anyOf, what a "not" turns into), the choice is kept for later (`forks`), since facts that come in
meanwhile rule out most of it. A Branch in which nothing can be is dead, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from quire.grammar.automata import regex_ast
from quire.grammar.schemas import document, formats
from quire.grammar.schemas.document import Node, Value
from quire.grammar.schemas.evaluate import exact, kind, token
from quire.grammar.schemas.shapes import Bound, Signed

ATOMS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""Kinds of values that do not meet. A fraction is a number that is not whole."""
NUMBERS = frozenset({"integer", "fraction"})

Act = Callable[["Branch"], None]
"""What one way out of a choice adds."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A choice that a keyword leaves."""

    place: str
    ways: tuple[Act, ...]
    whole: bool = True
    """No way is left out because a grammar could not say it."""


@dataclass(frozen=True, slots=True)
class Count:
    """So many items are what the Node asks for. most: None means any number."""

    item: Signed
    least: int
    most: int | None
    place: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing can be."""

    place: str
    what: str


class Branch:
    """Facts. Written by the tableau, one owner."""

    def __init__(self) -> None:
        self.todo: list[Signed] = []
        self.done: dict[Signed, None] = {}
        self.said: list[Node] = []
        """Nodes that hold, in the order they spoke: names of properties keep it."""
        self.beside: dict[Signed, list[Signed]] = {}
        """What each Node led to that judges the same value."""
        self.forks: list[Fork] = []
        self.dead: Reason | None = None
        self.lossy = False
        """Something that would be allowed was left out: a grammar could not say it."""
        self.kinds = ATOMS
        self.values: list[Value] | None = None
        self.barred: list[Value] = []
        self.low: Bound | None = None
        self.high: Bound | None = None
        self.steps: list[tuple[Fraction, str]] = []
        self.lengths: tuple[int, int | None] = (0, None)
        self.musts: list[regex_ast.RegexExpr] = []
        self.mustnts: list[regex_ast.RegexExpr] = []
        self.narrowed = False
        """Something that must match is written narrower than it is."""
        self.items: tuple[int, int | None] = (0, None)
        self.counts: list[Count] = []
        self.unique: str | None = None
        """Where uniqueItems stands."""
        self.at_place: dict[int, list[Signed]] = {}
        self.required: dict[str, str] = {}
        """Name to where it says so."""
        self.by_name: dict[str, list[Signed]] = {}
        self.sizes: tuple[int, int | None] = (0, None)
        self.others: list[Node] = []
        """Nodes whose additionalProperties some property must not fit."""
        self.places: dict[str, str] = {}
        """Where the latest fact of a kind stands: for messages."""

    def copy(self) -> Branch:
        """Another one of the same facts."""
        new = Branch.__new__(Branch)
        for name, value in self.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, list | dict) else value
        new.beside = {one: list(more) for one, more in self.beside.items()}
        new.at_place = {one: list(more) for one, more in self.at_place.items()}
        new.by_name = {one: list(more) for one, more in self.by_name.items()}
        return new

    def add(self, parent: Signed | None, *more: Signed) -> None:
        """These must hold as well. parent: which Node says so of the same value."""
        for one in more:
            if parent is not None:
                self.beside.setdefault(parent, []).append(one)
            if one in self.done:
                continue
            if (one[0], not one[1]) in self.done:
                self.die(one[0].place, "it would have to hold and not to hold")
            self.done[one] = None
            self.todo.append(one)

    def die(self, place: str, what: str) -> None:
        self.dead = self.dead or Reason(place, what)

    def keep(self, kinds: Iterable[str], place: str, what: str) -> None:
        """Only values of these kinds are left."""
        self.kinds = self.kinds & frozenset(kinds)
        if not self.kinds:
            self.die(place, what)

    def lose(self, kinds: Iterable[str], place: str, what: str) -> None:
        """No value of these kinds is left."""
        self.keep(ATOMS - frozenset(kinds), place, what)

    # -- facts ------------------------------------------------------------------------------------

    def among(self, values: list[Value], place: str) -> None:
        """The value is one of these."""
        self.places["values"] = place
        if self.values is not None:
            wanted = set(map(token, values))
            values = [one for one in self.values if token(one) in wanted]
        self.values = values
        found = {"fraction" if kind(one) == "number" else kind(one) for one in values}
        self.keep(found, place, "no value is left of enum and const")

    def from_(self, value: Fraction, is_open: bool, place: str) -> None:
        """Numbers are at least this, or over it."""
        new = Bound(value, is_open, place)
        if self.low is None or (value, is_open) > (self.low.value, self.low.open):
            self.low = new

    def to(self, value: Fraction, is_open: bool, place: str) -> None:
        """Numbers are at most this, or under it."""
        new = Bound(value, is_open, place)
        if self.high is None or (value, not is_open) < (self.high.value, not self.high.open):
            self.high = new

    def narrow(self, what: str, least: int, most: int | None, place: str) -> None:
        """Bounds of lengths, items or sizes."""
        low, high = getattr(self, what)
        top = high if most is None else most if high is None else min(high, most)
        low = max(low, least)
        setattr(self, what, (low, top))
        self.places[what] = place
        if top is not None and low > top:
            of = {"lengths": "string", "items": "array", "sizes": "object"}[what]
            self.lose({of}, place, f"no {of} has {low} or more and {top} or fewer")

    def need(self, name: str, place: str) -> None:
        """The property is there."""
        self.required.setdefault(name, place)

    def when_there(self, name: str, *more: Signed) -> None:
        """If the property is there, its value is so."""
        self.by_name.setdefault(name, []).extend(more)

    def at(self, place: int, *more: Signed) -> None:
        """If there is an item at this place, it is so."""
        self.at_place.setdefault(place, []).extend(more)


# -- what keywords without subschemas say --------------------------------


def say(branch: Branch, node: Node) -> None:
    """Take in what the node's words say."""
    words = node.words
    if "type" in words:
        branch.keep(atoms(words["type"]), node.at("type"), "no type is left")
    for word in ("enum", "const"):
        if word in words:
            given = words[word]
            branch.among(given if word == "enum" else [given], node.at(word))
    _say_numbers(branch, node)
    if "minLength" in words or "maxLength" in words:
        place = node.at("minLength" if "minLength" in words else "maxLength")
        _narrow(branch, "lengths", words, "minLength", "maxLength", place)
    if "pattern" in words:
        given, place = words["pattern"], node.at("pattern")
        branch.musts.append(document.pattern(given, place))
        branch.narrowed |= branch.musts[-1] != document.pattern(given, place, wide=True)
        branch.places["pattern"] = place
    if "minItems" in words or "maxItems" in words:
        place = node.at("minItems" if "minItems" in words else "maxItems")
        _narrow(branch, "items", words, "minItems", "maxItems", place)
    if "minProperties" in words or "maxProperties" in words:
        place = node.at("minProperties" if "minProperties" in words else "maxProperties")
        _narrow(branch, "sizes", words, "minProperties", "maxProperties", place)
    if words.get("uniqueItems"):
        branch.unique = node.at("uniqueItems")
    for place_of, name in enumerate(words.get("required", ())):
        branch.need(name, node.at("required", place_of))


def atoms(kinds: list[str]) -> set[str]:
    return {atom for one in kinds for atom in (NUMBERS if one == "number" else (one,))}


def _narrow(
    branch: Branch, what: str, words: dict[str, Value], least: str, most: str, place: str
) -> None:
    top = words.get(most)
    branch.narrow(what, int(words.get(least, 0)), None if top is None else int(top), place)


def _say_numbers(branch: Branch, node: Node) -> None:
    words = node.words
    for word, is_open in (("minimum", False), ("exclusiveMinimum", True)):
        if word in words:
            branch.from_(exact(words[word]), is_open, node.at(word))
    for word, is_open in (("maximum", False), ("exclusiveMaximum", True)):
        if word in words:
            branch.to(exact(words[word]), is_open, node.at(word))
    if "multipleOf" in words:
        branch.steps.append((exact(words["multipleOf"]), node.at("multipleOf")))
    if "format" in words:
        _say_format(branch, words["format"], node.at("format"))


def _say_format(branch: Branch, name: str, place: str) -> None:
    limits = formats.INTEGERS.get(name)
    if limits is not None:
        branch.from_(Fraction(limits[0]), False, place)
        branch.to(Fraction(limits[1]), False, place)
    tree = formats.node(name)
    if tree is not None:
        branch.musts.append(tree)
        branch.narrowed = True
        branch.places["pattern"] = place
        if name in formats.MOST_LENGTH:
            branch.narrow("lengths", 0, formats.MOST_LENGTH[name], place)
