"""Takes Keys apart into Shapes: each case of a schema on its own, cases that cannot be left out.

Tableau.cases(key) makes a Branch of the Key's Nodes, lets every keyword say its facts, and follows
one choice after the other. Cases of what is within arrays and objects are made when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.grammar.schemas import arrays, branch, objects, refutation, scalars
from quire.grammar.schemas.branch import ATOMS, Act, Branch, Fork, Reason
from quire.grammar.schemas.document import Document, Node, Refused, Value, refuse
from quire.grammar.schemas.evaluate import Effort, Judge, token
from quire.grammar.schemas.shapes import (
    FREE,
    NEVER,
    AnyValue,
    Array,
    Key,
    Object,
    Shape,
    Signed,
    Values,
    is_never,
)

MOST_CASES = 200
"""Of one Key."""
MOST_KEYS = 10_000
COPY = 20
"""Effort of following one way out of a choice."""
LOOK_DEPTH = 6
"""How far into arrays and objects is looked to see that nothing can be both of two schemas."""


class Tableau:
    """The cases of one document. closed: as in forms.Json."""

    def __init__(self, source: Document, closed: bool) -> None:
        self.source = source
        self.closed = closed
        self.effort = Effort()
        self.judge = Judge(source, self.effort)
        self.reasons: dict[Key, Reason] = {}
        """Why a Key has no cases."""
        self._cases: dict[Key, list[Shape]] = {}
        self._open: set[Key] = set()
        self._faces: dict[Node, _Face] = {}
        self.lossy: set[Key] = set()
        """Keys of which something was left out, since a grammar could not say it."""
        self._loses = False

    # -- Keys -------------------------------------------------------------------------------------

    def key(self, signed: Iterable[Signed]) -> Key:
        """The Key of these, less what says nothing."""
        kept = set()
        for node, sign in signed:
            node = self.behind(node)
            if node.plain:
                if not sign:
                    return NEVER
            elif not node.false:
                kept.add((node, sign))
            elif sign:
                return frozenset({(node, True)})
        return frozenset(kept)

    def behind(self, node: Node) -> Node:
        """What a node that is a mere $ref refers to in the end."""
        self.source.check_ends(node)
        while node.reference:
            self.effort.spend(node.place)
            node = self.source.target(node)
        return node

    def cases(self, key: Key) -> list[Shape]:
        """Its Shapes. Empty: nothing is allowed, and `reasons` says why."""
        known = self._cases.get(key)
        if known is None:
            self._open.add(key)
            loses, self._loses = self._loses, False
            known = self._cases[key] = self._made(key)
            if self._loses:
                self.lossy.add(key)
            self._loses = loses
            self._open.discard(key)
            if len(self._cases) > MOST_KEYS:
                refuse("", f"it has over {MOST_KEYS} different subschemas once it is written out")
        return known

    def empty(self, key: Key, depth: int = 0) -> bool:
        """Surely nothing is of the Key. False: something is, or that is not known."""
        if is_never(key):
            return True
        if key in self._open or depth > LOOK_DEPTH:
            return False
        cases = self.cases(key)
        return key not in self.lossy and all(self._hopeless(one, depth + 1) for one in cases)

    def allows(self, one: Branch, value: Value) -> bool:
        """Nothing that is said in plain words rules the value out."""
        return all(self.judge.words_hold(node, value) for node in one.said)

    def lose(self) -> None:
        """Take note that something which would be allowed is left out of what is being made."""
        self._loses = True

    def is_open(self, key: Key) -> bool:
        """Its cases are being made: nothing is known of it yet."""
        return key in self._open

    def _hopeless(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, Object):
            return any(self.empty(shape.named[name], depth) for name in shape.required)
        if isinstance(shape, Array):
            firsts = shape.first[: shape.least]
            needs_rest = shape.least > len(shape.first)
            return any(self.empty(key, depth) for key in [*firsts, *[shape.rest] * needs_rest])
        return False

    # -- from a Key to its cases --------------------------------

    def _made(self, key: Key) -> list[Shape]:
        if key == FREE:
            return [AnyValue()]
        start = Branch()
        self.effort.spend("", COPY)
        start.add(None, *sorted(key, key=lambda one: (one[0].number, not one[1])))
        found: list[Shape] = []
        reasons: list[Reason] = []
        place = min(key, key=lambda one: one[0].number)[0].place
        for end in self._ends(start, reasons):
            found += self._shapes(end, reasons)
            if len(found) > MOST_CASES:
                refuse(
                    place,
                    f"it comes to over {MOST_CASES} cases",
                    "use fewer choices (anyOf, oneOf, if, dependencies) beside one another",
                )
        if not found:
            self.reasons[key] = reasons[0] if reasons else Reason(place, "nothing is allowed")
        return found

    def _ends(self, start: Branch, reasons: list[Reason]) -> Iterator[Branch]:
        """Branches in which no choice is left, one after the other."""
        stack = [start]
        while stack:
            one = stack.pop()
            self._settle(one)
            if one.dead:
                reasons.append(one.dead)
            elif one.values is not None or not one.forks:
                yield one
            else:
                choice = one.forks.pop(0)
                stack += reversed(list(self._ways(one, choice)))
                if not choice.ways:
                    reasons.append(Reason(choice.place, CANNOT))

    def _ways(self, one: Branch, choice: Fork) -> Iterator[Branch]:
        for act in choice.ways:
            self.effort.spend(choice.place, COPY)
            way = one.copy()
            act(way)
            yield way

    def _settle(self, one: Branch) -> None:
        """Let all Nodes of a branch say what they say."""
        while one.todo and not one.dead:
            node, sign = one.todo.pop(0)
            self.source.check_ends(node)
            self.effort.spend(node.place)
            if not sign:
                self._refute(one, node)
            elif node.false:
                one.die(node.place, "false allows nothing")
            else:
                one.said.append(node)
                self._affirm(one, node)

    def _refute(self, one: Branch, node: Node) -> None:
        if node.false:
            return
        if node.plain:
            one.die(node.place, "this allows everything, and it must not hold")
            return
        choice = refutation.fork(self.source, node)
        self._loses |= not choice.whole
        if len(choice.ways) == 1:
            choice.ways[0](one)
        else:
            one.forks.append(choice)

    def _affirm(self, one: Branch, node: Node) -> None:
        signed = (node, True)
        branch.say(one, node)
        if "$ref" in node.words:
            self._first(one, signed, (self.source.target(node), True))
        for part in reversed(node.several.get("allOf", ())):
            self._first(one, signed, (part, True))
        if "not" in node.one:
            one.add(signed, (node.one["not"], False))
        for word in ("anyOf", "oneOf"):
            if word in node.several:
                self._choose(one, node, word)
        self._condition(one, node)
        self._dependencies(one, node)
        if "contains" in node.one:
            arrays.say_contains(one, node)

    def _first(self, one: Branch, parent: Signed, more: Signed) -> None:
        """Add it so that it is the next to speak: names of properties keep their order."""
        before = len(one.todo)
        one.add(parent, more)
        if len(one.todo) > before:
            one.todo.insert(0, one.todo.pop())

    # -- choices ----------------------------------------------------------------------------------

    def _choose(self, one: Branch, node: Node, word: str) -> None:
        parts = node.several[word]
        signed = (node, True)
        ways: list[Act] = []
        for place, part in enumerate(parts):
            against: list[Signed] = []
            if word == "oneOf":
                against = [
                    (other, False)
                    for at, other in enumerate(parts)
                    if at != place and self._meet(part, other)
                ]
            ways.append(_adding(signed, (part, True), *against))
        if len(ways) == 1:
            ways[0](one)
        else:
            one.forks.append(Fork(node.at(word), tuple(ways)))

    def _meet(self, one: Node, two: Node) -> bool:
        """Something may be of both."""
        self.effort.spend(one.place)
        if self._face(one).apart(self._face(two)):
            return False
        try:
            return not self.empty(self.key([(one, True), (two, True)]))
        except Refused:  # what is of both cannot be written down: then it must not be assumed away
            if self.effort.left < 0:
                raise
            self._open.clear()
            return True

    def _face(self, node: Node) -> _Face:
        node = self.behind(node)
        if node not in self._faces:
            self._faces[node] = _Face(self, node)
        return self._faces[node]

    def _condition(self, one: Branch, node: Node) -> None:
        if "if" not in node.one or not ("then" in node.one or "else" in node.one):
            return
        signed, ways = (node, True), []
        for word, sign in (("then", True), ("else", False)):
            more = [(node.one[word], True)] if word in node.one else []
            ways.append(_adding(signed, (node.one["if"], sign), *more))
        one.forks.append(Fork(node.at("if"), tuple(ways)))

    def _dependencies(self, one: Branch, node: Node) -> None:
        for name, more in node.words.get("dependentRequired", {}).items():
            place = node.at("dependentRequired", name)
            there = _needing([name, *more], place)
            one.forks.append(Fork(place, (there, _without(name), _no_object(place))))
        for name, part in node.named.get("dependentSchemas", {}).items():
            place = part.place
            also = _adding((node, True), (part, True))
            there = _both(_needing([name], place), also)
            one.forks.append(Fork(place, (there, _without(name), _no_object(place))))

    # -- from a branch without choices to Shapes --------------------------------

    def _shapes(self, one: Branch, reasons: list[Reason]) -> list[Shape]:
        if one.values is not None:
            return self._finite(one, reasons)
        if _says_nothing(one):
            return [AnyValue()]
        found: list[Shape] = []
        makers: tuple[Callable[[], Iterable[Shape]], ...] = (
            lambda: scalars.words(one),
            lambda: scalars.numbers(one),
            lambda: scalars.strings(one),
            lambda: arrays.shapes(self, one),
            lambda: objects.shapes(self, one),
        )
        for make in makers:
            found += make()
        self._loses |= one.lossy
        if not found:
            reasons.append(one.dead or Reason(_any_place(one), "no value is left"))
        return found

    def _finite(self, one: Branch, reasons: list[Reason]) -> list[Shape]:
        """The listed values that all Nodes of the branch agree to, each once."""
        kept: dict[object, Value] = {}
        for value in one.values or []:
            if all(self.judge.holds(node, value) == sign for node, sign in one.done):
                kept.setdefault(token(value), value)
        barred = set(map(token, one.barred))
        left = tuple(value for known, value in kept.items() if known not in barred)
        place = one.places["values"]
        if not left:
            reasons.append(Reason(place, "no value is left of those that are listed"))
        return [Values(left, place)] if left else []


CANNOT = "what it takes for this not to hold cannot be written as a grammar"


def _adding(parent: Signed, *more: Signed) -> Act:
    return lambda branch: branch.add(parent, *more)


def _needing(names: list[str], place: str) -> Act:
    def need(one: Branch) -> None:
        one.keep({"object"}, place, "the value would have to be an object")
        for name in names:
            one.need(name, place)

    return need


def _without(name: str) -> Act:
    def leave_out(one: Branch) -> None:
        if name in one.required:
            one.die(one.required[name], f"the property {name!r} is both required and ruled out")
        one.when_there(name, *NEVER)
        one.keep({"object"}, "", "the value would have to be an object")

    return leave_out


def _no_object(place: str) -> Act:
    return lambda one: one.lose({"object"}, place, "the value would have to be no object")


def _both(first: Act, second: Act) -> Act:
    def act(one: Branch) -> None:
        first(one)
        second(one)

    return act


def _any_place(one: Branch) -> str:
    return next(iter(one.places.values()), next(iter(one.done))[0].place)


def _says_nothing(one: Branch) -> bool:
    """No fact, and no Node with subschemas for what is within the value."""
    silent = one.kinds == ATOMS and not one.places and not one.required and not one.by_name
    silent = silent and one.low is None and one.high is None and not one.steps and not one.barred
    silent = silent and not one.mustnts and not one.counts and not one.others and not one.unique
    return silent and not any(sign and _looks_within(node) for node, sign in one.done)


def _looks_within(node: Node) -> bool:
    within = ("items", "additionalProperties", "propertyNames")
    rest = ("unevaluatedItems", "unevaluatedProperties")
    named = ("properties", "patternProperties")
    return (
        any(word in node.one for word in (*within, *rest))
        or "prefixItems" in node.several
        or any(word in node.named for word in named)
    )


class _Face:
    """What can be seen of a Node without taking it apart: enough to tell most branches of a oneOf
    from one another, which mark themselves by type or by a constant property."""

    def __init__(self, tableau: Tableau, node: Node) -> None:
        self.kinds = frozenset(ATOMS)
        if "type" in node.words:
            self.kinds = frozenset(branch.atoms(node.words["type"]))
        self.values = _listed(node)
        self.marks: dict[str, frozenset[object]] = {}
        for name in node.words.get("required", ()):
            part = node.named.get("properties", {}).get(name)
            listed = None if part is None else _listed(tableau.behind(part))
            if listed is not None:
                self.marks[name] = listed

    def apart(self, other: _Face) -> bool:
        """Nothing is of both."""
        if not self.kinds & other.kinds:
            return True
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        if self.kinds != {"object"} and other.kinds != {"object"}:
            return False
        return any(
            not listed & other.marks[name]
            for name, listed in self.marks.items()
            if name in other.marks
        )


def _listed(node: Node) -> frozenset[object] | None:
    words = node.words
    if "const" in words:
        return frozenset({token(words["const"])})
    return frozenset(map(token, words["enum"])) if "enum" in words else None
