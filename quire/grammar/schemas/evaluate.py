"""Whether one value is what a subschema asks for: the meaning of each keyword, for values of enum
and const, and for names of properties. In time of the sizes of both, patterns included.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from fractions import Fraction

from quire.grammar.automata import dfa
from quire.grammar.schemas import document, formats
from quire.grammar.schemas.document import Document, Node, Value

MOST_EFFORT = 50_000
"""Subschemas looked at, and the like, for one schema: about 0.2 s."""


class Effort:
    """How much may be done yet for one schema, whatever it asks."""

    def __init__(self, most: int = MOST_EFFORT) -> None:
        self.left = most

    def spend(self, place: str, amount: int = 1) -> None:
        self.left -= amount
        if self.left < 0:
            document.refuse(
                place,
                f"the cases of this schema are over {MOST_EFFORT}",
                "say with fewer anyOf, oneOf, if and not within one another what is allowed",
            )


def token(value: Value) -> Hashable:
    """Equal for values that JSON Schema calls equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, bool) or value is None:
        return ("word", value)
    if isinstance(value, list):
        return ("list", *map(token, value))
    if isinstance(value, dict):
        return frozenset((name, token(one)) for name, one in value.items())
    return value if isinstance(value, str) else ("number", value)


def exact(number: float) -> Fraction:
    """The number as it was written, not as a machine holds it."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def kind(value: Value) -> str:
    """Its type. A whole number is an integer, however it is written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class Judge:
    """Judges values by the Nodes of one document."""

    def __init__(self, source: Document, effort: Effort) -> None:
        self.source = source
        self.effort = effort
        self._enums: dict[Node, frozenset[Hashable]] = {}

    def holds(self, node: Node, value: Value) -> bool:
        """The value is what the node asks for."""
        self.effort.spend(node.place)
        if isinstance(node.source, bool):
            return node.source
        return (
            self.words_hold(node, value)
            and all(self._beside(node, value))
            and self._inner(node, value)
            and self._rest(node, value)
        )

    # -- keywords that hold no subschemas --------------------------------

    def words_hold(self, node: Node, value: Value) -> bool:
        """The value is what the keywords without subschemas ask for."""
        words, type_of = node.words, kind(value)
        kinds = words.get("type")
        whole = type_of == "integer" and kinds is not None and "number" in kinds
        if kinds is not None and type_of not in kinds and not whole:
            return False
        if "const" in words and token(words["const"]) != token(value):
            return False
        if "enum" in words and token(value) not in self._listed(node):
            return False
        if isinstance(value, dict):
            return self._names(node, value)
        if isinstance(value, list):
            return self._count(node, value)
        if isinstance(value, str):
            return self._text(node, value)
        return type_of not in ("integer", "number") or number_holds(words, value)

    def _listed(self, node: Node) -> frozenset[Hashable]:
        """Tokens of its enum."""
        known = self._enums.get(node)
        if known is None:
            known = self._enums[node] = frozenset(map(token, node.words["enum"]))
        return known

    def _text(self, node: Node, value: str) -> bool:
        words = node.words
        if not words.get("minLength", 0) <= len(value) <= words.get("maxLength", len(value)):
            return False
        self.effort.spend(node.place, len(value) // 8)
        if "pattern" in words:
            tree = document.pattern(words["pattern"], node.at("pattern"))
            if not dfa.fully_matches(tree, value):
                return False
        return "format" not in words or format_holds(words["format"], value)

    def _count(self, node: Node, value: list[Value]) -> bool:
        words = node.words
        count = len(value)
        if count < words.get("minItems", 0) or count > words.get("maxItems", count):
            return False
        return not words.get("uniqueItems") or len(set(map(token, value))) == len(value)

    def _names(self, node: Node, value: dict[str, Value]) -> bool:
        words, count = node.words, len(value)
        if not words.get("minProperties", 0) <= count <= words.get("maxProperties", count):
            return False
        needed = set(words.get("required", ()))
        for name, more in words.get("dependentRequired", {}).items():
            if name in value:
                needed.update(more)
        return needed <= value.keys()

    # -- subschemas of the same value --------------------------------

    def _beside(self, node: Node, value: Value) -> Iterator[bool]:
        several, one = node.several, node.one
        if "$ref" in node.words:
            yield self.holds(self.source.target(node), value)
        if "allOf" in several:
            yield all(self.holds(part, value) for part in several["allOf"])
        if "anyOf" in several:
            yield any(self.holds(part, value) for part in several["anyOf"])
        if "oneOf" in several:
            yield sum(self.holds(part, value) for part in several["oneOf"]) == 1
        if "not" in one:
            yield not self.holds(one["not"], value)
        if "if" in one:
            case = one.get("then" if self.holds(one["if"], value) else "else")
            yield case is None or self.holds(case, value)
        for name, part in node.named.get("dependentSchemas", {}).items():
            yield not (isinstance(value, dict) and name in value) or self.holds(part, value)

    # -- subschemas of what is within the value --------------------------------

    def _inner(self, node: Node, value: Value) -> bool:
        if isinstance(value, dict):
            return all(
                self.holds(part, one)
                for name, one in value.items()
                for part in self.parts_of_name(node, name)
            ) and ("propertyNames" not in node.one or self._named_well(node, value))
        if not isinstance(value, list):
            return True
        fit = all(
            self.holds(part, one)
            for place, one in enumerate(value)
            if (part := part_at(node, place)) is not None
        )
        return fit and ("contains" not in node.one or self._contains(node, value))

    def _named_well(self, node: Node, value: dict[str, Value]) -> bool:
        return all(self.holds(node.one["propertyNames"], name) for name in value)

    def _contains(self, node: Node, value: list[Value]) -> bool:
        found = sum(self.holds(node.one["contains"], one) for one in value)
        least: int = node.words.get("minContains", 1)
        most: int = node.words.get("maxContains", found)
        return least <= found <= most

    def parts_of_name(self, node: Node, name: str) -> list[Node]:
        """The subschemas that a property's value is judged by."""
        found = self.named_parts(node, name)
        if not found and "additionalProperties" in node.one:
            found.append(node.one["additionalProperties"])
        return found

    def named_parts(self, node: Node, name: str) -> list[Node]:
        """Those of properties and patternProperties."""
        properties = node.named.get("properties", {})
        found = [properties[name]] if name in properties else []
        for given, part in node.named.get("patternProperties", {}).items():
            self.effort.spend(node.place)
            if dfa.fully_matches(
                document.pattern(given, node.at("patternProperties", given)), name
            ):
                found.append(part)
        return found

    # -- what no other keyword has judged --------------------------------

    def _rest(self, node: Node, value: Value) -> bool:
        if isinstance(value, dict) and "unevaluatedProperties" in node.one:
            seen = self._judged(node, value)
            part = node.one["unevaluatedProperties"]
            return all(self.holds(part, one) for name, one in value.items() if name not in seen)
        if isinstance(value, list) and "unevaluatedItems" in node.one:
            seen = self._judged(node, value)
            part = node.one["unevaluatedItems"]
            return all(self.holds(part, one) for at, one in enumerate(value) if at not in seen)
        return True

    def _judged(self, node: Node, value: Value, outer: bool = False) -> set[str | int]:
        """Names or places that the node, or one beside it that holds, has judged."""
        self.effort.spend(node.place)
        seen: set[str | int] = set()
        if isinstance(value, dict):
            seen.update(name for name in value if self.parts_of_name(node, name))
            everything = "unevaluatedProperties"
        else:
            seen.update(at for at in range(len(value)) if part_at(node, at) is not None)
            everything = "unevaluatedItems"
            if "contains" in node.one:
                part = node.one["contains"]
                seen.update(at for at, one in enumerate(value) if self.holds(part, one))
        if outer and everything in node.one:
            seen.update(value if isinstance(value, dict) else range(len(value)))
        for part in self._in_force(node, value):
            if self.holds(part, value):
                seen |= self._judged(part, value, outer=True)
        return seen

    def _in_force(self, node: Node, value: Value) -> Iterator[Node]:
        """Subschemas of the same value whose judgement counts."""
        one = node.one
        if "$ref" in node.words:
            yield self.source.target(node)
        for word in ("allOf", "anyOf", "oneOf"):
            yield from node.several.get(word, ())
        if "if" in one:
            yield one["if"]
            case = one.get("then" if self.holds(one["if"], value) else "else")
            yield from () if case is None else (case,)
        for name, part in node.named.get("dependentSchemas", {}).items():
            if isinstance(value, dict) and name in value:
                yield part


def part_at(node: Node, place: int) -> Node | None:
    """The subschema that an item is judged by."""
    first = node.several.get("prefixItems", ())
    return first[place] if place < len(first) else node.one.get("items")


def number_holds(words: dict[str, Value], value: float) -> bool:
    """The number is within the bounds, and a multiple if it must be."""
    number = exact(value)
    if "minimum" in words and number < exact(words["minimum"]):
        return False
    if "maximum" in words and number > exact(words["maximum"]):
        return False
    if "exclusiveMinimum" in words and number <= exact(words["exclusiveMinimum"]):
        return False
    if "exclusiveMaximum" in words and number >= exact(words["exclusiveMaximum"]):
        return False
    limits = formats.INTEGERS.get(words.get("format", ""))
    if limits is not None and not limits[0] <= number <= limits[1]:
        return False
    return "multipleOf" not in words or (number / exact(words["multipleOf"])).denominator == 1


def format_holds(name: str, value: str) -> bool:
    """The text is of the format, as far as it is written here."""
    tree = formats.node(name)
    if tree is None:
        return True
    return len(value) <= formats.MOST_LENGTH.get(name, len(value)) and dfa.fully_matches(
        tree, value
    )
