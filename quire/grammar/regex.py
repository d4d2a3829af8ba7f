"""Regular expressions as trees: read from what ECMA-262, Python and Rust share, written for all.

    parse(pattern)  -> Node       refuses what no linear-time engine has: lookaround, references
    whole(node)     -> Node       the same without ^ and $: it matches the text as a whole
    text(node)      -> str        a spelling that Rust, Python and xgrammar read alike

Where dialects differ (`\\w`, `.`, `$` before a line break) a tree means what all of them take.
Sets of texts (automata) are in quire.grammar.texts.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from quire.errors import RequestError

MOST_CHARS = 16_384
"""Of one pattern."""
MOST_DEPTH = 100
"""Groups within groups."""
MOST_POSITIONS = 50_000
"""Characters of a pattern when its counts are written out: (a{1,100}){1,100} has 10,000."""
TOP = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, from first to last, sorted, without touching one another. No surrogates."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these. No ranges: nothing matches."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other. No parts: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of them."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """least times or more. most: None means without end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start of the text, or its end."""

    end: bool


Node = Chars | Seq | Alt | Repeat | Anchor

EMPTY = Seq(())
NOTHING = Chars(())
ALL: Ranges = ((0, 0xD7FF), (0xE000, TOP))
ANY = Repeat(Chars(ALL), 0, None)
"""Any text."""

_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32))
_BREAKS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_ALL_SPACE: Ranges = (
    *((9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_ASSIGNED = 0x40000
"""No letters or digits stand further up."""
_NARROW = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27}
_BOTH = re.compile(r"\\s.*\\S|\\S.*\\s|\\d.*\\D|\\D.*\\d|\\w.*\\W|\\W.*\\w")
"""A class of a letter and of its opposite."""
_SYNTAX = frozenset("\\^$.|?*+()[]{}/")


# -- sets of characters -------------------------------------------------------------------------


def union(*sets: Ranges) -> Ranges:
    """Characters of any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in sets for one in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def others(ranges: Ranges) -> Ranges:
    """Characters that are not of the set."""
    found, start = [], 0
    for first, last in union(ranges, ((0xD800, 0xDFFF),)):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    if start <= TOP:
        found.append((start, TOP))
    return tuple(found)


def common(one: Ranges, two: Ranges) -> Ranges:
    """Characters of both sets."""
    return others(union(others(one), others(two)))


@functools.cache
def _wide(letter: str) -> Ranges:
    """What any dialect counts as a digit, a word character, white space."""
    if letter == "s":
        return _ALL_SPACE
    assigned = "".join(map(chr, [*range(0xD800), *range(0xE000, _ASSIGNED)]))
    runs = re.finditer(f"\\{letter}+", assigned)
    return tuple((ord(one.group()[0]), ord(one.group()[-1])) for one in runs)


def _named_class(letter: str, wide: bool) -> Ranges:
    """\\d, \\W ...: what all dialects agree on; wide: what any of them takes."""
    name = letter.lower()
    if letter == name:
        return union(_NARROW[name], _wide(name)) if wide else _NARROW[name]
    return others(_NARROW[name]) if wide else others(_wide(name))


# -- reading ------------------------------------------------------------------------------------


class _Reader:
    """One pass over a pattern."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self.pattern = pattern
        self.wide = wide
        self.at = 0
        self.depth = 0
        self.no_case = False
        self.dot_all = False

    def refuse(self, what: str) -> RequestError:
        near = self.pattern[max(self.at - 8, 0) : self.at + 12]
        return RequestError(f"the regular expression has {what} (at {self.at}, near {near!r})")

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def take(self) -> str:
        if self.at >= len(self.pattern):
            raise self.refuse("an unfinished escape, class or group at its end")
        self.at += 1
        return self.pattern[self.at - 1]

    def all(self) -> Node:
        node = self.alternatives()
        if self.at < len(self.pattern):
            raise self.refuse("a closing bracket too many")
        return node

    def alternatives(self) -> Node:
        parts = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.peek() not in "|)":
            parts.append(self.quantified())
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def quantified(self) -> Node:
        node = self.atom()
        count = self.count()
        if count is None:
            return node
        if isinstance(node, Anchor):
            raise self.refuse("a count behind ^ or $")
        if self.peek() == "?":  # lazy: the same texts
            self.at += 1
        if self.peek() == "+" or self.count() is not None:
            raise self.refuse("a count behind a count")
        return Repeat(node, *count)

    def count(self) -> tuple[int, int | None] | None:
        """The count that stands here, if one does."""
        sign = self.peek()
        if sign in ("*", "+", "?"):
            self.at += 1
            return (int(sign == "+"), 1 if sign == "?" else None)
        found = re.compile(r"\{([0-9]{1,9})(,([0-9]{0,9}))?\}").match(self.pattern, self.at)
        if found is None:
            if re.compile(r"\{,?[0-9]+,?[0-9]*\}").match(self.pattern, self.at):
                raise self.refuse("a count that dialects read in different ways: write {0,n}")
            return None
        self.at = found.end()
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self.refuse(f"a count whose least, {least}, is over its most, {most}")
        return least, most

    def atom(self) -> Node:
        sign = self.take()
        if sign == "(":
            return self.group()
        if sign == "[":
            return Chars(self.char_class())
        if sign == ".":
            breaks = ((10, 10),) if self.wide else _BREAKS
            return Chars(ALL if self.dot_all else others(breaks))
        if sign in "^$":
            return self.anchor(sign == "$")
        if sign in "*+?":
            self.at -= 1
            raise self.refuse("a count with nothing before it")
        if sign == "\\":
            return self.escape()
        return Chars(self.folded(((ord(sign), ord(sign)),)))

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.refuse(f"groups within groups over {MOST_DEPTH} deep")
        flags = (self.no_case, self.dot_all)
        closed = self.opening()
        node = EMPTY if closed else self.alternatives()
        if not closed:
            if self.peek() != ")":
                raise self.refuse("a group that is not closed")
            self.at += 1
            self.no_case, self.dot_all = flags
        self.depth -= 1
        return node

    def opening(self) -> bool:
        """Read what follows a "(": True if that was flags for all that follows, closed already."""
        if self.peek() != "?":
            return False
        if self.peek(2) == "?:":
            self.at += 2
            return False
        name = re.compile(r"\?P?<[A-Za-z_]\w*>").match(self.pattern, self.at)
        if name is not None:
            self.at = name.end()
            return False
        if self.peek(2) in ("?=", "?!") or self.peek(3) in ("?<=", "?<!"):
            raise self.refuse("a look-ahead or look-behind, which takes more than linear time")
        flags = re.compile(r"\?([a-z]+)([:)])").match(self.pattern, self.at)
        if flags is None or set(flags[1]) - {"i", "s"}:
            raise self.refuse("a kind of group that is not known here: (?:...) is, and (?i), (?s)")
        self.no_case |= "i" in flags[1]
        self.dot_all |= "s" in flags[1]
        self.at = flags.end()
        return flags[2] == ")"

    def anchor(self, end: bool) -> Node:
        """Python's $ also matches before a last line break."""
        last_break = Repeat(Chars(((10, 10),)), 0, 1)
        return Seq((last_break, Anchor(True))) if end and self.wide else Anchor(end)

    def escape(self) -> Node:
        letter = self.peek()
        if letter in ("A", "z", "Z") and letter:
            self.at += 1
            return Anchor(letter != "A")
        return Chars(self.folded(self.escaped(self.wide)))

    def escaped(self, wide: bool) -> Ranges:
        """The characters that the escape behind a backslash stands for."""
        letter = self.take()
        if letter in "dDwWsS":
            return _named_class(letter, wide)
        if letter in "bBkGKXRQE" or letter in "123456789":
            what = "a reference to a group" if letter in "k123456789" else f"\\{letter}"
            raise self.refuse(f"{what}, which a grammar cannot follow")
        if letter in "pPNC":
            raise self.refuse(f"\\{letter}: write the characters as a class, [...]")
        point = self.code_point(letter)
        return ((point, point),)

    def code_point(self, letter: str) -> int:
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "0":
            if self.peek().isdigit():
                raise self.refuse("an octal escape: write \\xHH")
            return 0
        if letter == "x":
            return self.hexadecimal(2)
        if letter in "uU":
            return self.unicode(letter)
        if letter == "c" and self.peek().isalpha() and self.peek().isascii():
            return ord(self.take()) % 32
        if letter.isalnum() and letter.isascii():
            raise self.refuse(f"an unknown escape, \\{letter}")
        return ord(letter)

    def unicode(self, letter: str) -> int:
        if self.peek() == "{":
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at + 1 : end] if end > 0 else ""
            if not re.fullmatch("[0-9a-fA-F]{1,8}", digits) or int(digits, 16) > TOP:
                raise self.refuse("a \\u{...} that is no code point")
            self.at = end + 1
            return int(digits, 16)
        point = self.hexadecimal(4 if letter == "u" else 8)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
        if 0xD800 <= point < 0xDC00 and low is not None:
            self.at = low.end()
            return 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if point > TOP or 0xD800 <= point < 0xE000:
            raise self.refuse("an escape that is no character")
        return point

    def hexadecimal(self, count: int) -> int:
        digits = self.peek(count)
        if not re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits):
            raise self.refuse(f"an escape without its {count} hexadecimal digits")
        self.at += count
        return int(digits, 16)

    def char_class(self) -> Ranges:
        negated = self.peek() == "^"
        self.at += negated
        if self.peek() == "]":
            return self.bracket_first(negated)
        start = self.at
        sets: list[Ranges] = []
        while self.peek() != "]":
            sets.append(self.class_item(negated != self.wide))
        self.at += 1
        if _BOTH.search(self.pattern, start, self.at):
            sets.append(ALL)  # "anything", as people write it
        found = self.folded(union(*sets))
        return others(found) if negated else common(found, ALL)

    def bracket_first(self, negated: bool) -> Ranges:
        """[^] is anything in ECMA-262; in Python the bracket is of the class."""
        self.at += 1
        if not negated or (self.peek() and self.peek() not in "*+?{$)|"):
            raise self.refuse("[] or [^], which dialects read in different ways")
        return ALL

    def class_item(self, wide: bool) -> Ranges:
        first = self.class_atom(wide)
        if self.peek() != "-" or self.peek(2) == "-]":
            return first
        self.at += 1
        last = self.class_atom(wide)
        if not (_single(first) and _single(last)):
            raise self.refuse("a range of a class that begins or ends with a class")
        if last[0][0] < first[0][0]:
            raise self.refuse("a range of a class that ends before it begins")
        return ((first[0][0], last[0][0]),)

    def class_atom(self, wide: bool) -> Ranges:
        sign = self.take()
        if sign != "\\":
            return ((ord(sign), ord(sign)),)
        if self.peek() == "b":
            self.at += 1
            return ((8, 8),)
        return self.escaped(wide)

    def folded(self, ranges: Ranges) -> Ranges:
        """With both cases of ASCII letters, where case is to be ignored."""
        if not self.no_case:
            return ranges
        upper, lower = common(ranges, ((65, 90),)), common(ranges, ((97, 122),))
        moved = [(a + 32, b + 32) for a, b in upper] + [(a - 32, b - 32) for a, b in lower]
        return union(ranges, tuple(moved))


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def parse(pattern: str, wide: bool = False) -> Node:
    """The tree. Raises RequestError that says what a grammar cannot follow, and where.

    wide: what any of the dialects takes, to be excluded; else what all of them take.
    """
    if len(pattern) > MOST_CHARS:
        raise RequestError(
            f"the regular expression has {len(pattern)} characters; the limit is {MOST_CHARS}"
        )
    if "\0" in pattern:
        raise RequestError("the regular expression holds a NUL character")
    node = _Reader(pattern, wide).all()
    if (count := positions(node)) > MOST_POSITIONS:
        raise RequestError(
            f"the regular expression has {count} characters with its counts written out; "
            f"the limit is {MOST_POSITIONS}: make its counts smaller"
        )
    return node


# -- what a tree is -----------------------------------------------------------------------------


def positions(node: Node) -> int:
    """Characters, counts written out."""
    if isinstance(node, Repeat):
        return positions(node.part) * max(node.most or node.least, 1)
    if isinstance(node, Seq | Alt):
        return sum(map(positions, node.parts))
    return int(isinstance(node, Chars))


def literal(value: str) -> Node:
    """Exactly this text."""
    return Seq(tuple(Chars(((ord(c), ord(c)),)) for c in value))


def lengths(node: Node) -> tuple[int, int | None] | None:
    """The fewest and the most characters of a text, or None if nothing matches."""
    if isinstance(node, Chars):
        return (1, 1) if node.ranges else None
    if isinstance(node, Repeat):
        inner = lengths(node.part)
        if inner is None or inner[1] == 0:
            return (0, 0) if node.least == 0 or inner else None
        endless = node.most is None or inner[1] is None
        return inner[0] * node.least, None if endless else (inner[1] or 0) * (node.most or 0)
    if isinstance(node, Anchor):
        return 0, 0
    found = [lengths(one) for one in node.parts]
    if isinstance(node, Seq):
        return _added([one for one in found if one]) if None not in found else None
    kept = [one for one in found if one]
    if not kept:
        return None
    tops = [most for _, most in kept]
    return min(least for least, _ in kept), None if None in tops else max(t or 0 for t in tops)


def _added(parts: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    tops = [most for _, most in parts]
    return sum(least for least, _ in parts), None if None in tops else sum(t or 0 for t in tops)


def has_anchor(node: Node) -> bool:
    """^ or $ stands somewhere in it."""
    if isinstance(node, Repeat):
        return has_anchor(node.part)
    if isinstance(node, Seq | Alt):
        return any(map(has_anchor, node.parts))
    return isinstance(node, Anchor)


# -- from searching to matching as a whole ------------------------------------------------------


def whole(node: Node, search: bool = True) -> Node:
    """The node without anchors. search: it may match anywhere within the text, so that what may
    stand around it becomes part of it; False: it matches as a whole as it is."""
    return _bound(node, open_left=search, open_right=search)


def _bound(node: Node, *, open_left: bool, open_right: bool) -> Node:
    """Anchors at the ends dropped, and any text put where an open end has none."""
    parts = _flat(node)
    while parts and parts[0] == Anchor(False):
        parts, open_left = parts[1:], False
    while parts and parts[-1] == Anchor(True):
        parts, open_right = parts[:-1], False
    options = _split(parts)
    if options is not None:
        made = [_bound(one, open_left=open_left, open_right=open_right) for one in options]
        return Alt(tuple(made))
    if any(map(has_anchor, parts)):
        raise RequestError(
            "the regular expression has ^ or $ in its middle; write them at its ends only"
        )
    before: list[Node] = [ANY] if open_left else []
    after: list[Node] = [ANY] if open_right and (parts or not open_left) else []
    return Seq((*before, *parts, *after))


def _flat(node: Node) -> tuple[Node, ...]:
    """The parts of a sequence, sequences within it opened."""
    if not isinstance(node, Seq):
        return (node,)
    return tuple(part for one in node.parts for part in _flat(one))


def _split(parts: tuple[Node, ...]) -> list[Node] | None:
    """Alternatives of a sequence whose first or last part is a choice with an anchor in it."""
    for place in (0, -1):
        if not parts or not has_anchor(parts[place]):
            continue
        options = _options(parts[place])
        if options is None:
            return None
        rest = parts[1:] if place == 0 else parts[:-1]
        return [Seq((one, *rest) if place == 0 else (*rest, one)) for one in options]
    return None


def _options(node: Node) -> tuple[Node, ...] | None:
    if isinstance(node, Alt):
        return node.parts
    if isinstance(node, Repeat) and (node.least, node.most) == (0, 1):
        return node.part, EMPTY
    return None


# -- writing ------------------------------------------------------------------------------------


def text(node: Node) -> str:
    """The tree as a pattern, in a spelling that no two dialects read differently."""
    if isinstance(node, Chars):
        return _class_text(node.ranges)
    if isinstance(node, Anchor):
        return "$" if node.end else "^"
    if isinstance(node, Repeat):
        return _grouped(node.part) + _count_text(node.least, node.most)
    if isinstance(node, Seq):
        return "".join(f"(?:{text(p)})" if isinstance(p, Alt) else text(p) for p in node.parts)
    return "|".join(map(text, node.parts)) if node.parts else _class_text(())


def anchored(node: Node) -> str:
    """Of a node without anchors: the pattern that matches the same texts under search as well."""
    return f"^(?:{text(node)})$"


def _grouped(node: Node) -> str:
    return text(node) if isinstance(node, Chars) else f"(?:{text(node)})"


def _count_text(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short is not None:
        return short
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _class_text(ranges: Ranges) -> str:
    if not ranges:
        raise RequestError("the regular expression has a class that no character is of")
    if _single(ranges):
        return _char_text(ranges[0][0])
    negated = others(ranges)
    if not negated:
        return f"[\\x00-{chr(TOP)}]"
    if len(negated) < len(ranges) or ranges[-1][1] == TOP:
        return f"[^{_ranges_text(negated)}]"
    return f"[{_ranges_text(ranges)}]"


def _ranges_text(ranges: Ranges) -> str:
    return "".join(
        _char_text(first, True) + (f"-{_char_text(last, True)}" if last > first else "")
        for first, last in ranges
    )


def _char_text(point: int, in_class: bool = False) -> str:
    char = chr(point)
    if point in (9, 10, 13):
        return {9: "\\t", 10: "\\n", 13: "\\r"}[point]
    if point < 32 or 127 <= point < 160:
        return f"\\x{point:02x}"
    if in_class:
        return f"\\{char}" if char in "\\]^-[" else f"\\x{point:02x}" if char in "&~|#" else char
    return f"\\{char}" if char in _SYNTAX else char
