"""What it takes for a Node not to hold: one keyword of it must fail, in one of some ways.

Each way is an Act on a Branch. Ways that a grammar cannot say (a number that is no multiple, a
list with something twice) are left out where others are left: what is allowed is then narrower,
never wider. Where none is left, the Node that must not hold is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.grammar.schemas import document, formats
from quire.grammar.schemas.branch import NUMBERS, Act, Branch, Count, Fork
from quire.grammar.schemas.document import Document, Node
from quire.grammar.schemas.evaluate import exact
from quire.grammar.schemas.shapes import NEVER, Signed

WINDOW = 4
"""Places of an array, behind those that have a schema of their own, at which an item may fail."""


def fork(source: Document, node: Node) -> Fork:
    """The ways in which a node does not hold."""
    ways = tuple(_ways(source, node))
    return Fork(node.place, ways, _can_be_said(node))


def _can_be_said(node: Node) -> bool:
    """There is a way for each keyword, and for all that would make it fail."""
    words, one = node.words, node.one
    lost = any(word in words for word in ("multipleOf", "format")) or words.get("uniqueItems")
    within = ("propertyNames", "unevaluatedItems", "unevaluatedProperties", "items", "contains")
    others = "additionalProperties" in one or "patternProperties" in node.named
    return not (lost or others or any(word in one for word in within))


def _ways(source: Document, node: Node) -> Iterator[Act]:
    yield from _of_words(node)
    if "$ref" in node.words:
        yield _also(node, (source.target(node), False))
    yield from _of_beside(node)
    yield from _of_objects(node)
    yield from _of_arrays(node)


def _also(node: Node, *more: Signed) -> Act:
    return lambda branch: branch.add((node, False), *more)


def _only(kind: str, act: Act, place: str) -> Act:
    """The value is of a kind, and more."""

    def both(branch: Branch) -> None:
        branch.keep({kind}, place, f"the value would have to be of type {kind}")
        act(branch)

    return both


# -- words ----------------------------------------


def _of_words(node: Node) -> Iterator[Act]:
    words = node.words
    if "type" in words:
        given = {a for one in words["type"] for a in (NUMBERS if one == "number" else (one,))}
        place = node.at("type")
        yield lambda branch: branch.lose(given, place, "no type is left")
    if "const" in words:
        yield lambda branch: branch.barred.append(words["const"])
    if "enum" in words:
        yield lambda branch: branch.barred.extend(words["enum"])
    yield from _of_numbers(node)
    yield from _of_text(node)
    for what, kind, least, most in (
        ("lengths", "string", "minLength", "maxLength"),
        ("items", "array", "minItems", "maxItems"),
        ("sizes", "object", "minProperties", "maxProperties"),
    ):
        if words.get(least):
            yield _only(kind, _narrowed(what, 0, int(words[least]) - 1, node.at(least)), node.place)
        if most in words:
            yield _only(
                kind, _narrowed(what, int(words[most]) + 1, None, node.at(most)), node.place
            )


def _narrowed(what: str, least: int, most: int | None, place: str) -> Act:
    return lambda branch: branch.narrow(what, least, most, place)


def _of_numbers(node: Node) -> Iterator[Act]:
    words = node.words

    def numbers(act: Act) -> Act:
        def both(branch: Branch) -> None:
            branch.keep(NUMBERS, node.place, "the value would have to be a number")
            act(branch)

        return both

    for word, is_open in (("minimum", True), ("exclusiveMinimum", False)):
        if word in words:
            bound, place = exact(words[word]), node.at(word)
            yield numbers(lambda b, v=bound, o=is_open, p=place: b.to(v, o, p))  # type: ignore[misc]
    for word, is_open in (("maximum", True), ("exclusiveMaximum", False)):
        if word in words:
            bound, place = exact(words[word]), node.at(word)
            yield numbers(lambda b, v=bound, o=is_open, p=place: b.from_(v, o, p))  # type: ignore[misc]
    limits = formats.INTEGERS.get(words.get("format", ""))
    if limits is not None:
        low, high = exact(limits[0]), exact(limits[1])
        yield numbers(lambda branch: branch.to(low, True, node.at("format")))
        yield numbers(lambda branch: branch.from_(high, True, node.at("format")))


def _of_text(node: Node) -> Iterator[Act]:
    """Formats are written narrower than they are: what is not of one cannot be said."""
    if "pattern" in node.words:
        place = node.at("pattern")
        tree = document.pattern(node.words["pattern"], place, wide=True)

        def differ(branch: Branch) -> None:
            branch.mustnts.append(tree)
            branch.places["pattern"] = place

        yield _only("string", differ, place)


# -- subschemas of the same value --------------------------------


def _of_beside(node: Node) -> Iterator[Act]:
    several, one = node.several, node.one
    for part in several.get("allOf", ()):
        yield _also(node, (part, False))
    if "anyOf" in several:
        yield _also(node, *((part, False) for part in several["anyOf"]))
    if "oneOf" in several:
        parts = several["oneOf"]
        yield _also(node, *((part, False) for part in parts))
        for place, part in enumerate(parts):
            for other in parts[place + 1 :]:
                yield _also(node, (part, True), (other, True))
    if "not" in one:
        yield _also(node, (one["not"], True))
    if "if" in one:
        for word, sign in (("then", True), ("else", False)):
            if word in one:
                yield _also(node, (one["if"], sign), (one[word], False))
    for name, part in node.named.get("dependentSchemas", {}).items():
        yield _there(node, name, node.at("dependentSchemas", name), _also(node, (part, False)))


def _there(node: Node, name: str, place: str, act: Act) -> Act:
    """An object that has the property, and more."""

    def both(branch: Branch) -> None:
        branch.need(name, place)
        act(branch)

    return _only("object", both, node.place)


# -- objects and arrays ----------------------------------------


def _of_objects(node: Node) -> Iterator[Act]:
    for name in node.words.get("required", ()):
        yield _only("object", _absent(name), node.place)
    for name, more in node.words.get("dependentRequired", {}).items():
        place = node.at("dependentRequired", name)
        for other in more:
            yield _there(node, name, place, _absent(other))
    for name, part in node.named.get("properties", {}).items():
        yield _there(node, name, part.place, _value_not(name, part))
    if "additionalProperties" in node.one or "patternProperties" in node.named:
        yield _only("object", lambda branch: branch.others.append(node), node.place)


def _absent(name: str) -> Act:
    return lambda branch: branch.when_there(name, *NEVER)


def _value_not(name: str, part: Node) -> Act:
    return lambda branch: branch.when_there(name, (part, False))


def _of_arrays(node: Node) -> Iterator[Act]:
    first = node.several.get("prefixItems", [])
    for place, part in enumerate(first):
        yield _item_not(node, place, part)
    if "items" in node.one:
        for place in range(len(first), len(first) + WINDOW):
            yield _item_not(node, place, node.one["items"])
    if "contains" in node.one:
        least = node.words.get("minContains", 1)
        item, place_of = (node.one["contains"], True), node.at("contains")
        if least:
            yield _only("array", _counted(Count(item, 0, int(least) - 1, place_of)), node.place)
        if "maxContains" in node.words:
            most = int(node.words["maxContains"])
            yield _only("array", _counted(Count(item, most + 1, None, place_of)), node.place)


def _counted(count: Count) -> Act:
    return lambda branch: branch.counts.append(count)


def _item_not(node: Node, place: int, part: Node) -> Act:
    def differ(branch: Branch) -> None:
        branch.narrow("items", place + 1, None, part.place)
        branch.at(place, (part, False))

    return _only("array", differ, node.place)
