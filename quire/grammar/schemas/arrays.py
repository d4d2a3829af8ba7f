"""Shapes of arrays. A grammar can say what stands at a place, not that something stands anywhere:
contains and uniqueItems become choices between places, where those are few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.grammar.schemas.branch import Branch, Count
from quire.grammar.schemas.document import Node, Value, refuse
from quire.grammar.schemas.evaluate import part_at, token
from quire.grammar.schemas.shapes import FREE, NEVER, Array, Key, Shape, Signed, Values, is_never

if TYPE_CHECKING:
    from quire.grammar.schemas.tableau import Tableau

CONTAINS_WINDOW = 8
"""What contains asks for stands among so many first items, where nothing bounds them."""
MOST_PLACES = 64
"""Ways to choose the places of what contains asks for."""
MOST_SEQUENCES = 200
"""Arrays that uniqueItems is written out into."""


def say_contains(branch: Branch, node: Node) -> None:
    """Take in contains, minContains and maxContains."""
    least = int(node.words.get("minContains", 1))
    most = node.words.get("maxContains")
    place = node.at("contains")
    item = (node.one["contains"], True)
    if most is not None and most < least:
        branch.lose({"array"}, node.at("maxContains"), f"maxContains is under minContains, {least}")
    elif least or most is not None:
        branch.counts.append(Count(item, least, None if most is None else int(most), place))
        branch.narrow("items", least, None, place)


def shapes(tableau: Tableau, branch: Branch) -> list[Shape]:
    """One Shape for each choice of places. Empty: no array is left."""
    if "array" not in branch.kinds:
        return []
    if not _without_barred(tableau, branch):
        return []
    least, most = branch.items
    array = _plain(tableau, branch)
    array.least, array.most = least, most
    found = [array]
    for count in branch.counts:
        found = [one for array in found for one in _counted(tableau, array, count)]
    if branch.unique is not None:
        place = branch.unique
        found = [one for array in found for one in _unique(tableau, array, place)]
    good = [one for array in found if (one := _cut(array)) is not None]
    if not good:
        branch.die(branch.places.get("items", array.place), "no array is left")
    return list(good)


def _without_barred(tableau: Tableau, branch: Branch) -> bool:
    """See to arrays that are ruled out one by one: the empty one is; others take all with them."""
    for value in branch.barred:
        if not isinstance(value, list) or not tableau.allows(branch, value):
            continue
        if value:
            tableau.lose()
            branch.die(branch.said[0].place if branch.said else "", "a list is ruled out by itself")
            return False
        branch.narrow("items", 1, None, "")
    return "array" in branch.kinds


def _plain(tableau: Tableau, branch: Branch) -> Array:
    """What items, prefixItems and unevaluatedItems say."""
    nodes = branch.said
    length = max([len(node.several.get("prefixItems", ())) for node in nodes], default=0)
    length = max([length, *(place + 1 for place in branch.at_place)])
    rest_nodes = [node for node in nodes if "unevaluatedItems" in node.one]
    keys = []
    for place in range(length + 1):  # the last one stands for all places behind
        parts: list[Signed] = [
            (part, True) for node in nodes if (part := part_at(node, place)) is not None
        ]
        parts += branch.at_place.get(place, ()) if place < length else ()
        for node in rest_nodes:
            if not any(_judges(one, place, one is node) for one in _below(branch, node)):
                parts.append((node.one["unevaluatedItems"], True))
        tableau.effort.spend(nodes[0].place if nodes else "")
        keys.append(tableau.key(parts))
    return Array(keys[:-1], keys[-1], place=nodes[0].place if nodes else "")


def _below(branch: Branch, node: Node) -> list[Node]:
    """The node, and all that hold beside it because of it."""
    seen: dict[Signed, None] = {(node, True): None}
    todo = [(node, True)]
    while todo:
        for one in branch.beside.get(todo.pop(), ()):
            if one[1] and one not in seen:
                seen[one] = None
                todo.append(one)
    return [one for one, _ in seen]


def _judges(node: Node, place: int, own: bool) -> bool:
    return part_at(node, place) is not None or (not own and "unevaluatedItems" in node.one)


def _cut(array: Array) -> Array | None:
    """Ended before the first place where nothing can be. None: there is no such array."""
    top = array.most
    for place, key in enumerate([*array.first, array.rest]):
        if is_never(key) and (top is None or place < top):
            top = place
    if top is not None and array.least > top:
        return None
    first = array.first if top is None else array.first[:top]
    ends_early = top is not None and top <= len(first)
    rest = NEVER if ends_early else array.rest
    return Array(first, rest, array.least, top, array.place)


# -- contains ----------------------------------------


def _counted(tableau: Tableau, array: Array, count: Count) -> Iterator[Array]:
    """The array with what is counted put to chosen places, and kept from all others if there may
    not be more of it."""
    top = array.most
    if top is None or top > len(array.first) + CONTAINS_WINDOW:
        tableau.lose()
        top = max(len(array.first) + CONTAINS_WINDOW, count.least)
    if count.item in set(array.rest).union(*array.first) and _all_counted(array, count):
        yield _as_many(array, count)
        return
    numbers = [count.least] if count.most is None else range(count.least, count.most + 1)
    chosen = [
        places
        for number in numbers
        for places in itertools.islice(itertools.combinations(range(top), number), MOST_PLACES + 1)
    ]
    if len(chosen) > MOST_PLACES:
        refuse(
            count.place,
            f"what it asks for can stand in over {MOST_PLACES} ways",
            "bound the array with maxItems, or ask for it at a place with prefixItems",
        )
    for places in chosen:
        yield _placed(tableau, array, count, places)


def _all_counted(array: Array, count: Count) -> bool:
    return all(count.item in key for key in [*array.first, array.rest] if not is_never(key))


def _as_many(array: Array, count: Count) -> Array:
    """Every item is what is counted: as many of it as there are items."""
    most = array.most
    if count.most is not None:
        most = count.most if most is None else min(most, count.most)
    return Array(array.first, array.rest, max(array.least, count.least), most, array.place)


def _placed(tableau: Tableau, array: Array, count: Count, places: tuple[int, ...]) -> Array:
    node, sign = count.item
    length = max(len(array.first), places[-1] + 1 if places else 0)
    only = count.most is not None
    keys = []
    for place in range(length + 1):
        key = array.at(place) if place < length else array.rest
        if place in places:
            key = tableau.key([*key, (node, sign)])
        elif only:
            key = tableau.key([*key, (node, not sign)])
        keys.append(key)
    least = max(array.least, places[-1] + 1 if places else 0)
    return Array(keys[:-1], keys[-1], least, array.most, array.place)


# -- uniqueItems ----------------------------------------


def _unique(tableau: Tableau, array: Array, place: str) -> Iterator[Array]:
    """The array, written out, if its items are of few values."""
    top = _length(array)
    if top is not None and top <= 1:
        yield array
        return
    lists = [_finite(tableau, key) for key in array.first]
    rest = _finite(tableau, array.rest)
    if None in lists or rest is None:
        if top is None:
            refuse(place, _TOLD, "list the values that items may have with enum, or leave it out")
        yield from _apart_by_place(tableau, array, top, place)
        return
    values = [one for one in lists if one is not None]
    sequences = _sequences(values, rest, array.least, top, ordered=False)
    if sequences is None and not values:
        tableau.lose()
        sequences = _sequences(values, rest, array.least, top, ordered=True)
    if sequences is None:
        refuse(
            place,
            f"it comes to over {MOST_SEQUENCES} arrays once it is written out",
            "list fewer values, or bound the array with a smaller maxItems",
        )
    for one in sequences:
        yield _exactly(one, array)


_TOLD = "a grammar cannot tell whether two items are the same"


def _length(array: Array) -> int | None:
    """The most items that there can be."""
    for at, key in enumerate([*array.first, array.rest]):
        if is_never(key):
            return at if array.most is None else min(at, array.most)
    return array.most


def _apart_by_place(tableau: Tableau, array: Array, top: int, place: str) -> Iterator[Array]:
    """The array as it is, if no two of its places have a value in common."""
    for one, two in itertools.combinations(range(min(top, 16)), 2):
        if not tableau.empty(tableau.key([*array.at(one), *array.at(two)])):
            refuse(place, _TOLD, "list the values that items may have with enum, or leave it out")
    if top > 16:
        refuse(place, _TOLD)
    yield array


def _finite(tableau: Tableau, key: Key) -> list[Value] | None:
    """All values of the Key, if they are few and listed."""
    if is_never(key):
        return []
    if key == FREE or tableau.is_open(key):
        return None
    found: dict[object, Value] = {}
    for shape in tableau.cases(key):
        if not isinstance(shape, Values):
            return None
        found.update({token(value): value for value in shape.values})
    return list(found.values())


Sequence = tuple[tuple[Value, ...], list[Value]]
"""An array's items but the last, and what the last may be."""


def _sequences(
    first: list[list[Value]], rest: list[Value], least: int, top: int | None, ordered: bool
) -> list[Sequence] | None:
    """Arrays without a value twice, ordered: in the order of the list. None: too many."""
    found: list[Sequence] = [((), [])] if least == 0 else []
    todo: list[tuple[Value, ...]] = [()]
    while todo:
        head = todo.pop(0)
        if top is not None and len(head) >= top:
            continue
        left = _left(head, first[len(head)] if len(head) < len(first) else rest, ordered)
        if left and len(head) + 1 >= least:
            found.append((head, left))
        todo += [(*head, value) for value in left]
        if len(found) > MOST_SEQUENCES or len(todo) > 20 * MOST_SEQUENCES:
            return None
    return found


def _left(head: tuple[Value, ...], values: list[Value], ordered: bool) -> list[Value]:
    taken = set(map(token, head))
    if ordered and head:
        tokens = list(map(token, values))
        values = values[tokens.index(token(head[-1])) + 1 :]
    return [value for value in values if token(value) not in taken]


def _exactly(sequence: Sequence, array: Array) -> Array:
    head, last = sequence
    lists = [*([value] for value in head), *([last] if last else [])]
    keys = [listed(values) for values in lists]
    return Array(keys, NEVER, len(keys), len(keys), array.place)


def listed(values: list[Value]) -> Key:
    """The Key of exactly these values."""
    node = Node(0, "", "", {"enum": values})
    node.words["enum"] = values
    return frozenset({(node, True)})
