"""Shapes of objects: what may be there by name, and what by any other name.

Names that patterns match are told apart by automata: each name is of exactly one class (the set of
patterns that match it), and classes become patterns that do not meet. Counts of properties become
choices of which optional properties are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from quire.grammar.automata import dfa, regex_ast
from quire.grammar.schemas import document, scalars
from quire.grammar.schemas.arrays import _below
from quire.grammar.schemas.branch import Branch
from quire.grammar.schemas.document import Node, refuse
from quire.grammar.schemas.shapes import (
    NEVER,
    AnyValue,
    Free,
    Key,
    Object,
    Shape,
    Signed,
    Strings,
    Values,
    is_never,
)

if TYPE_CHECKING:
    from quire.grammar.schemas.tableau import Tableau

MOST_CHOICES = 64
"""Ways to choose which optional properties are there, for minProperties and maxProperties."""
MOST_CLASS_PATTERNS = 4
"""Patterns of names that hold for one object at once."""
MOST_OPTIONAL = 400
"""Properties that may be left out, of one object: backends follow all of them at once."""


def shapes(tableau: Tableau, branch: Branch) -> list[Shape]:
    """One Shape for each choice that counts leave. Empty: no object is left."""
    if "object" not in branch.kinds:
        return []
    if not _without_barred(tableau, branch):
        return []
    maker = _Maker(tableau, branch)
    found: list[Shape] = []
    for whole in maker.wholes():
        one = maker.checked(whole)
        found += [] if one is None else _chosen(one, branch)
    if not found:
        place = branch.places.get("sizes", maker.place)
        branch.die(
            place, "no object is left: names, counts and what is required rule one another out"
        )
    return found


def _without_barred(tableau: Tableau, branch: Branch) -> bool:
    """See to objects that are ruled out one by one: the empty one is; others take all with them."""
    for value in branch.barred:
        if not isinstance(value, dict) or not tableau.allows(branch, value):
            continue
        if value:
            tableau.lose()
            branch.die(
                branch.said[0].place if branch.said else "", "an object is ruled out by itself"
            )
            return False
        branch.narrow("sizes", 1, None, "")
    return "object" in branch.kinds


class _Maker:
    """Finds what a branch says of each name."""

    def __init__(self, tableau: Tableau, branch: Branch) -> None:
        self.tableau = tableau
        self.branch = branch
        self.nodes = branch.said
        self.place = self.nodes[0].place if self.nodes else ""
        self.rest = [
            (node, _below(branch, node))
            for node in self.nodes
            if "unevaluatedProperties" in node.one
        ]
        self.patterns = self._patterns()
        self.named_by = [node for node in self.nodes if "propertyNames" in node.one]
        self.closed = tableau.closed and self._silent()

    def _patterns(self) -> dict[str, regex_ast.RegexExpr]:
        found: dict[str, regex_ast.RegexExpr] = {}
        for node in [*self.nodes, *self.branch.others]:
            for given in node.named.get("patternProperties", ()):
                place = node.at("patternProperties", given)
                found[given] = document.pattern(given, place)
        if len(found) > MOST_CLASS_PATTERNS:
            refuse(
                self.place,
                f"{len(found)} patterns of names hold at once; the limit is {MOST_CLASS_PATTERNS}",
            )
        return found

    def _silent(self) -> bool:
        """Properties are named, and nothing is said of others."""
        says = ("additionalProperties", "unevaluatedProperties")
        return any("properties" in node.named for node in self.nodes) and not any(
            word in node.one for node in self.nodes for word in says
        )

    def names(self) -> list[str]:
        """All that are named anywhere, in the order they are named in."""
        found: dict[str, None] = {}
        for node in [*self.nodes, *self.branch.others]:
            found.update(dict.fromkeys(node.named.get("properties", ())))
        found.update(dict.fromkeys(self.branch.required))
        found.update(dict.fromkeys(self.branch.by_name))
        for values in self._listed_names():
            found.update(dict.fromkeys(values))
        if len(found) > document.MOST_PROPERTIES:
            refuse(self.place, f"{len(found)} properties; the limit is {document.MOST_PROPERTIES}")
        return list(found)

    def _listed_names(self) -> Iterator[list[str]]:
        """Names of a propertyNames that lists them."""
        for node in self.named_by:
            cases = self.tableau.cases(self.tableau.key([(node.one["propertyNames"], True)]))
            if all(isinstance(one, Values) for one in cases):
                lists = [one.values for one in cases if isinstance(one, Values)]
                yield [name for one in lists for name in one if isinstance(name, str)]

    # -- what a property's value is --------------------------------

    def wholes(self) -> Iterator[Object]:
        """The object; several, where one of some properties must not be what others says."""
        names = self.names()
        known = {name: self._known(name) for name in names}
        named = {name: self._key_of(name, known[name]) for name in names}
        whole = Object(named, set(self.branch.required), self._free(names), place=self.place)
        found = [whole]
        for node in self.branch.others:
            found = [one for before in found for one in self._unlike(before, node, known)]
        yield from found

    def _known(self, name: str) -> frozenset[str]:
        """Patterns that match the name."""
        return frozenset(
            given for given, node in self.patterns.items() if dfa.fully_matches(node, name)
        )

    def _key_of(self, name: str, matched: frozenset[str]) -> Key:
        self.tableau.effort.spend(self.place)
        for node in self.named_by:
            if not self.tableau.judge.holds(node.one["propertyNames"], name):
                return NEVER
        parts = self._parts(name, matched)
        parts += self.branch.by_name.get(name, ())
        return self.tableau.key(parts)

    def _parts(self, name: str | None, matched: frozenset[str]) -> list[Signed]:
        """What Nodes say of a name; None: of one that none of them names."""
        parts: list[Signed] = []
        for node in self.nodes:
            own = _named(node, name, matched)
            if not own and "additionalProperties" in node.one:
                own = [node.one["additionalProperties"]]
            parts += [(one, True) for one in own]
        for node, below in self.rest:
            if not any(_judges(one, name, matched, one is node) for one in below):
                parts.append((node.one["unevaluatedProperties"], True))
        if self.closed and name is None and not matched:
            return list(NEVER)
        return parts

    # -- other names --------------------------------

    def _free(self, names: list[str]) -> list[Free]:
        classes: dict[Key, list[frozenset[str]]] = {}
        for count in range(len(self.patterns) + 1):
            for chosen in itertools.combinations(self.patterns, count):
                matched = frozenset(chosen)
                key = self.tableau.key(self._parts(None, matched))
                if not is_never(key):
                    classes.setdefault(key, []).append(matched)
        wanted = list(self._name_shapes())
        if wanted == [None] and len(classes) == 1 and not names:
            (key, of_key), *_ = classes.items()
            if len(of_key) == 2 ** len(self.patterns):
                return [Free(None, key)]
        return [
            Free(node, key)
            for key, of_key in classes.items()
            for matched in of_key
            for shape in wanted
            if (node := self._class(matched, names, shape)) is not None
        ]

    def _name_shapes(self) -> Iterator[Strings | None]:
        """What propertyNames leaves of names; None: all."""
        nodes = [(node.one["propertyNames"], True) for node in self.named_by]
        key = self.tableau.key(nodes)
        for shape in self.tableau.cases(key):
            if isinstance(shape, AnyValue):
                yield None
            elif isinstance(shape, Strings):
                yield (
                    None
                    if shape.patterns == () and shape.most is None and not shape.least
                    else shape
                )

    def _class(
        self, matched: frozenset[str], names: list[str], shape: Strings | None
    ) -> regex_ast.RegexExpr | None:
        """Names that these patterns match, and no other pattern, and that are not named."""
        all_of = [self.patterns[given] for given in sorted(matched)]
        if shape is not None:
            all_of += [*shape.patterns, *_counter(shape)]
        others = [
            document.pattern(given, self.place, wide=True)
            for given in self.patterns
            if given not in matched
        ]
        inside = [name for name in names if all(dfa.fully_matches(one, name) for one in all_of)]
        if not all_of and not others:
            return scalars.except_literals(inside)
        if len(all_of) == 1 and not others and not inside:
            return all_of[0]
        none_of = [*others, *map(regex_ast.literal_regex, inside)]
        try:
            node = dfa.difference(all_of or [regex_ast.ANY_TEXT], none_of)
        except dfa.DfaTooComplex:
            refuse(
                self.place,
                "the names that patternProperties, propertyNames and properties leave are too much "
                "to tell apart",
                "use patterns of names that no name can match two of",
            )
        return None if node == regex_ast.NO_MATCH else node

    # -- what must not hold --------------------------------

    def _unlike(
        self, whole: Object, node: Node, known: dict[str, frozenset[str]]
    ) -> Iterator[Object]:
        """The object, with one property that is not as the node's patternProperties or
        additionalProperties say."""
        for name, key in whole.named.items():
            parts = _named(node, name, known[name])
            in_properties = name in node.named.get("properties", {})
            if in_properties:
                parts = parts[1:]
            elif not parts and "additionalProperties" in node.one:
                parts = [node.one["additionalProperties"]]
            for part in parts:
                more = self.tableau.key([*key, (part, False)])
                named = {**whole.named, name: more}
                yield Object(named, whole.required | {name}, whole.free, place=whole.place)

    def checked(self, whole: Object) -> Object | None:
        """The object, if what is required can be there."""
        branch = self.branch
        for name in whole.required:
            if is_never(whole.named[name]):
                place = branch.required.get(name, self.place)
                branch.die(place, f"the property {name!r} is required, and its value is ruled out")
                return None
        if len(whole.optional) > MOST_OPTIONAL:
            refuse(
                self.place,
                f"{len(whole.optional)} properties may be left out; the limit is {MOST_OPTIONAL}",
                "make them required, or use additionalProperties",
            )
        whole.least, whole.most = branch.sizes
        return whole


def _named(node: Node, name: str | None, matched: Iterable[str]) -> list[Node]:
    """Its properties and patternProperties that judge the name."""
    properties = node.named.get("properties", {})
    found = [properties[name]] if name is not None and name in properties else []
    patterns = node.named.get("patternProperties", {})
    return found + [part for given, part in patterns.items() if given in matched]


def _judges(node: Node, name: str | None, matched: frozenset[str], own: bool) -> bool:
    if _named(node, name, matched) or "additionalProperties" in node.one:
        return True
    return not own and "unevaluatedProperties" in node.one


def _counter(shape: Strings) -> list[regex_ast.RegexExpr]:
    if not shape.least and shape.most is None:
        return []
    return [
        regex_ast.RegexRepeat(regex_ast.CharClass(regex_ast.ALL_CHARS), shape.least, shape.most)
    ]


# -- counts ---------------------------------------------------------------------------------------


def _chosen(whole: Object, branch: Branch) -> list[Object]:
    """Objects whose counts hold, whichever of their optional properties are there."""
    place = branch.places.get("sizes", whole.place)
    found = list(_at_least(whole, place))
    return [one for before in found for one in _at_most(before, place)]


def _at_least(whole: Object, place: str) -> Iterator[Object]:
    needed = whole.least - len(whole.required)
    if needed <= 0:
        yield _copy(whole, least=0)
        return
    optional = whole.optional
    for chosen in _few(optional, needed, place):
        yield _copy(whole, required=whole.required | set(chosen), least=0)
    if not whole.free:
        return
    if len(optional) < needed - 1:
        refuse(
            place,
            "a grammar cannot see to it that two properties of names that are not listed have "
            "different names",
            "list names in properties, or ask for one such property at most",
        )
    for chosen in _few(optional, needed - 1, place):
        required = whole.required | set(chosen)
        named = _less(whole, set(optional) - set(chosen))
        yield _copy(whole, named=named, required=required, least=len(required) + 1)


def _at_most(whole: Object, place: str) -> Iterator[Object]:
    most = whole.most
    optional = whole.optional
    if most is None or (not whole.free and len(whole.required) + len(optional) <= most):
        yield _copy(whole, most=None)
        return
    room = most - len(whole.required)
    if room < 0 or whole.least > most:
        return
    if not whole.free:
        for chosen in _few(optional, room, place):
            yield _copy(whole, named=_less(whole, set(optional) - set(chosen)), most=None)
        return
    for count in range(min(room, len(optional)) + 1):
        for chosen in _few(optional, count, place):
            required = whole.required | set(chosen)
            named = _less(whole, set(optional) - set(chosen))
            if len(required) == most:
                yield _copy(whole, named=named, required=required, free=[], most=None, least=0)
            else:
                yield _copy(whole, named=named, required=required)


def _few(names: list[str], count: int, place: str) -> list[tuple[str, ...]]:
    found = list(itertools.islice(itertools.combinations(names, count), MOST_CHOICES + 1))
    if len(found) > MOST_CHOICES:
        refuse(
            place,
            f"the count can be had in over {MOST_CHOICES} ways",
            "make some of the properties required, or leave the count out",
        )
    return found


def _less(whole: Object, without: set[str]) -> dict[str, Key]:
    return {name: NEVER if name in without else key for name, key in whole.named.items()}


def _copy(
    whole: Object,
    *,
    named: dict[str, Key] | None = None,
    required: set[str] | None = None,
    free: list[Free] | None = None,
    least: int | None = None,
    most: int | bool | None = False,
) -> Object:
    return Object(
        dict(whole.named if named is None else named),
        set(whole.required if required is None else required),
        list(whole.free if free is None else free),
        whole.least if least is None else least,
        whole.most if most is False else most,
        whole.place,
    )
