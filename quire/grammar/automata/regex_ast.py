"""Regular expressions as trees, read from the common part of ECMA-262, Python and Rust.

    parse_regex(pattern)  -> RegexExpr    refuses lookaround and references: no linear-time engine
    without_anchors(node) -> RegexExpr    matches the text as a whole
    to_pattern(node)      -> str          a spelling that Rust and Python read alike

Where dialects differ (`\\w`, `.`, `$` before a line break) a tree matches what all of them match.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from dataclasses import dataclass

from quire.errors import RequestError

MAX_CHARS = 16_384
"""Of one pattern."""
MAX_DEPTH = 100
"""Groups within groups."""
MAX_COUNT_WAYS = 2_000
"""Of counts within counts: a mask takes 0.5 ms for so many, and 7 ms for 16,000."""
MAX_POSITIONS = 50_000
"""Characters of a pattern when its counts are written out: (a{1,100}){1,100} has 10,000."""
MAX_CODE_POINT = 0x10FFFF

CharRanges = tuple[tuple[int, int], ...]
"""Code points, from first to last, sorted, without touching one another. No surrogates."""


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character of these. No ranges: nothing matches."""

    ranges: CharRanges


@dataclass(frozen=True, slots=True)
class RegexSequence:
    """One after the other. No parts: the empty text."""

    parts: tuple[RegexExpr, ...]


@dataclass(frozen=True, slots=True)
class RegexAlternation:
    """One of them."""

    parts: tuple[RegexExpr, ...]


@dataclass(frozen=True, slots=True)
class RegexRepeat:
    """least times or more. most: None means without end."""

    part: RegexExpr
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True)
class RegexAnchor:
    """The start of the text, or its end."""

    end: bool


RegexExpr = CharClass | RegexSequence | RegexAlternation | RegexRepeat | RegexAnchor

EMPTY = RegexSequence(())
NO_MATCH = CharClass(())
ALL_CHARS: CharRanges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))
ANY_TEXT = RegexRepeat(CharClass(ALL_CHARS), 0, None)
"""Any text."""

_DIGIT: CharRanges = ((48, 57),)
_WORD: CharRanges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: CharRanges = ((9, 13), (32, 32))
_BREAKS: CharRanges = ((10, 10), (13, 13), (0x2028, 0x2029))
_ALL_SPACE: CharRanges = (
    *((9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_ASSIGNED = 0x40000
"""No letters or digits have higher code points."""
_NARROW = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27}
_COMPLEMENTARY_CLASSES = re.compile(r"\\s.*\\S|\\S.*\\s|\\d.*\\D|\\D.*\\d|\\w.*\\W|\\W.*\\w")
"""A class of a letter and of its opposite."""
_SYNTAX = frozenset("\\^$.|?*+()[]{}/")


# -- sets of characters -------------------------------------------------------------------------


def union_ranges(*sets: CharRanges) -> CharRanges:
    """Characters of any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in sets for one in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement_ranges(ranges: CharRanges) -> CharRanges:
    """Characters that are not of the set."""
    found, start = [], 0
    for first, last in union_ranges(ranges, ((0xD800, 0xDFFF),)):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    if start <= MAX_CODE_POINT:
        found.append((start, MAX_CODE_POINT))
    return tuple(found)


def intersect_ranges(one: CharRanges, two: CharRanges) -> CharRanges:
    """Characters of both sets."""
    return complement_ranges(union_ranges(complement_ranges(one), complement_ranges(two)))


@functools.cache
def _wide_class(letter: str) -> CharRanges:
    """Characters that any dialect counts as digits, word characters or white space."""
    if letter == "s":
        return _ALL_SPACE
    assigned = "".join(map(chr, [*range(0xD800), *range(0xE000, _ASSIGNED)]))
    runs = re.finditer(f"\\{letter}+", assigned)
    return tuple((ord(one.group()[0]), ord(one.group()[-1])) for one in runs)


_LONG_CATEGORIES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S"}


@functools.cache
def _category(name: str) -> CharRanges:
    """Characters of a Unicode category (L, Lu); none: there is no such category."""
    return union_ranges(tuple((a, b) for kind, a, b in _categories() if kind.startswith(name)))


@functools.cache
def _categories() -> list[tuple[str, int, int]]:
    """All characters but surrogates, in runs of one category."""
    found: list[tuple[str, int, int]] = []
    kinds = map(unicodedata.category, map(chr, range(MAX_CODE_POINT + 1)))
    start = 0
    for kind, run in itertools.groupby(kinds):
        end = start + sum(1 for _ in run)
        if kind != "Cs":
            found.append((kind, start, end - 1))
        start = end
    return found


def _named_class(letter: str, wide: bool) -> CharRanges:
    """\\d, \\W ...: what all dialects agree on; wide: what any of them takes."""
    name = letter.lower()
    if letter == name:
        return union_ranges(_NARROW[name], _wide_class(name)) if wide else _NARROW[name]
    return complement_ranges(_NARROW[name]) if wide else complement_ranges(_wide_class(name))


class UnsupportedRegex(RequestError):
    """A regular expression of some dialect that a grammar cannot follow."""


# -- reading ------------------------------------------------------------------------------------


class _RegexParser:
    """One pass over a pattern."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self.pattern = pattern
        self.wide = wide
        self.position = 0
        self.depth = 0
        self.ignore_case = False
        self.dot_all = False

    def error(self, what: str, kind: type[RequestError] = RequestError) -> RequestError:
        near = self.pattern[max(self.position - 8, 0) : self.position + 12]
        return kind(f"the regular expression has {what} (at {self.position}, near {near!r})")

    def unsupported(self, what: str) -> RequestError:
        return self.error(what, UnsupportedRegex)

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.position : self.position + count]

    def take(self) -> str:
        if self.position >= len(self.pattern):
            raise self.error("an unfinished escape, class or group at its end")
        self.position += 1
        return self.pattern[self.position - 1]

    def whole_pattern(self) -> RegexExpr:
        node = self.alternatives()
        if self.position < len(self.pattern):
            raise self.error("a closing bracket too many")
        return node

    def alternatives(self) -> RegexExpr:
        parts = [self.sequence()]
        while self.peek() == "|":
            self.position += 1
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else RegexAlternation(tuple(parts))

    def sequence(self) -> RegexExpr:
        parts: list[RegexExpr] = []
        while self.position < len(self.pattern) and self.peek() not in "|)":
            parts.append(self.quantified())
        return parts[0] if len(parts) == 1 else RegexSequence(tuple(parts))

    def quantified(self) -> RegexExpr:
        node = self.atom()
        count = self.count()
        if count is None:
            return node
        if isinstance(node, RegexAnchor):
            raise self.error("a count behind ^ or $")
        if self.peek() == "?":  # lazy: the same texts
            self.position += 1
        if self.peek() == "+" or self.count() is not None:
            raise self.error("a count behind a count")
        return RegexRepeat(node, *count)

    def count(self) -> tuple[int, int | None] | None:
        """The count at this position, if there is one."""
        sign = self.peek()
        if sign in ("*", "+", "?"):
            self.position += 1
            return (int(sign == "+"), 1 if sign == "?" else None)
        found = re.compile(r"\{([0-9]{1,9})(,([0-9]{0,9}))?\}").match(self.pattern, self.position)
        if found is None:
            if re.compile(r"\{,?[0-9]+,?[0-9]*\}").match(self.pattern, self.position):
                raise self.unsupported("a count that dialects read in different ways: write {0,n}")
            return None
        self.position = found.end()
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self.error(f"a count whose least, {least}, is over its most, {most}")
        return least, most

    def atom(self) -> RegexExpr:
        sign = self.take()
        if sign == "(":
            return self.group()
        if sign == "[":
            return CharClass(self.char_class())
        if sign == ".":
            breaks = ((10, 10),) if self.wide else _BREAKS
            return CharClass(ALL_CHARS if self.dot_all else complement_ranges(breaks))
        if sign in "^$":
            return self.anchor(sign == "$")
        if sign in "*+?":
            self.position -= 1
            raise self.error("a count with nothing before it")
        if sign == "\\":
            return self.escape()
        return CharClass(self.case_folded(((ord(sign), ord(sign)),)))

    def group(self) -> RegexExpr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"groups within groups over {MAX_DEPTH} deep")
        flags = (self.ignore_case, self.dot_all)
        closed = self.opening()
        node = EMPTY if closed else self.alternatives()
        if not closed:
            if self.peek() != ")":
                raise self.error("a group that is not closed")
            self.position += 1
            self.ignore_case, self.dot_all = flags
        self.depth -= 1
        return node

    def opening(self) -> bool:
        """Read what follows a "(": True if that was flags for all that follows, closed already."""
        if self.peek() != "?":
            return False
        if self.peek(2) == "?:":
            self.position += 2
            return False
        name = re.compile(r"\?P?<[A-Za-z_]\w*>").match(self.pattern, self.position)
        if name is not None:
            self.position = name.end()
            return False
        if self.peek(2) in ("?=", "?!") or self.peek(3) in ("?<=", "?<!"):
            raise self.unsupported("a look-ahead or look-behind, which takes more than linear time")
        flags = re.compile(r"\?([a-z]+)([:)])").match(self.pattern, self.position)
        if flags is None or set(flags[1]) - {"i", "s"}:
            raise self.unsupported(
                "a kind of group that is not known here: (?:...) is, and (?i), (?s)"
            )
        self.ignore_case |= "i" in flags[1]
        self.dot_all |= "s" in flags[1]
        self.position = flags.end()
        return flags[2] == ")"

    def anchor(self, end: bool) -> RegexExpr:
        """Python's $ also matches before a last line break."""
        last_break = RegexRepeat(CharClass(((10, 10),)), 0, 1)
        return (
            RegexSequence((last_break, RegexAnchor(True)))
            if end and self.wide
            else RegexAnchor(end)
        )

    def escape(self) -> RegexExpr:
        letter = self.peek()
        if letter in ("A", "z", "Z") and letter:
            self.position += 1
            return RegexAnchor(letter != "A")
        return CharClass(self.case_folded(self.escaped(self.wide)))

    def escaped(self, wide: bool) -> CharRanges:
        """The characters of the escape after a backslash."""
        letter = self.take()
        if letter in "dDwWsS":
            return _named_class(letter, wide)
        if letter in "bBkGKXRQE" or letter in "123456789":
            what = "a reference to a group" if letter in "k123456789" else f"\\{letter}"
            raise self.unsupported(f"{what}, which a grammar cannot follow")
        if letter in "pP":
            return self.unicode_category(letter == "P")
        if letter in "NC":
            raise self.unsupported(f"\\{letter}: write the characters as a class, [...]")
        point = self.code_point(letter)
        return ((point, point),)

    def unicode_category(self, negated: bool) -> CharRanges:
        found = re.compile(r"\{([A-Z][a-z]?|Letter|Number|Punctuation|Symbol)\}").match(
            self.pattern, self.position
        )
        ranges = () if found is None else _category(_LONG_CATEGORIES.get(found[1], found[1]))
        if found is None or not ranges:
            raise self.unsupported("\\p of something else than a general category, as in \\p{L}")
        self.position = found.end()
        return complement_ranges(ranges) if negated else ranges

    def code_point(self, letter: str) -> int:
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "0":
            if self.peek().isdigit():
                raise self.error("an octal escape: write \\xHH")
            return 0
        if letter == "x":
            return self.hexadecimal(2)
        if letter in "uU":
            return self.unicode(letter)
        if letter == "c" and self.peek().isalpha() and self.peek().isascii():
            return ord(self.take()) % 32
        if letter.isalnum() and letter.isascii():
            raise self.error(f"an unknown escape, \\{letter}")
        return ord(letter)

    def unicode(self, letter: str) -> int:
        if self.peek() == "{":
            end = self.pattern.find("}", self.position)
            digits = self.pattern[self.position + 1 : end] if end > 0 else ""
            if not re.fullmatch("[0-9a-fA-F]{1,8}", digits) or int(digits, 16) > MAX_CODE_POINT:
                raise self.error("a \\u{...} that is no code point")
            self.position = end + 1
            return int(digits, 16)
        point = self.hexadecimal(4 if letter == "u" else 8)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.position)
        if 0xD800 <= point < 0xDC00 and low is not None:
            self.position = low.end()
            return 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if point > MAX_CODE_POINT or 0xD800 <= point < 0xE000:
            raise self.error("an escape that is no character")
        return point

    def hexadecimal(self, count: int) -> int:
        digits = self.peek(count)
        if not re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits):
            raise self.error(f"an escape without its {count} hexadecimal digits")
        self.position += count
        return int(digits, 16)

    def char_class(self) -> CharRanges:
        negated = self.peek() == "^"
        self.position += negated
        if self.peek() == "]":
            return self.bracket_first(negated)
        start = self.position
        sets: list[CharRanges] = []
        while self.peek() != "]":
            sets.append(self.class_item(negated != self.wide))
        self.position += 1
        if _COMPLEMENTARY_CLASSES.search(self.pattern, start, self.position):
            sets.append(ALL_CHARS)  # "anything", as people write it
        found = self.case_folded(union_ranges(*sets))
        return complement_ranges(found) if negated else intersect_ranges(found, ALL_CHARS)

    def bracket_first(self, negated: bool) -> CharRanges:
        """[^] is anything in ECMA-262; in Python the bracket is of the class."""
        self.position += 1
        if not negated or (self.peek() and self.peek() not in "*+?{$)|"):
            raise self.unsupported("[] or [^], which dialects read in different ways")
        return ALL_CHARS

    def class_item(self, wide: bool) -> CharRanges:
        first = self.class_atom(wide)
        if self.peek() != "-" or self.peek(2) == "-]":
            return first
        self.position += 1
        last = self.class_atom(wide)
        if not (_is_single_char(first) and _is_single_char(last)):
            raise self.unsupported("a range of a class that begins or ends with a class")
        if last[0][0] < first[0][0]:
            raise self.error("a range of a class that ends before it begins")
        return ((first[0][0], last[0][0]),)

    def class_atom(self, wide: bool) -> CharRanges:
        sign = self.take()
        if sign != "\\":
            return ((ord(sign), ord(sign)),)
        if self.peek() == "b":
            self.position += 1
            return ((8, 8),)
        return self.escaped(wide)

    def case_folded(self, ranges: CharRanges) -> CharRanges:
        """With both cases of ASCII letters, where case is to be ignored."""
        if not self.ignore_case:
            return ranges
        upper, lower = intersect_ranges(ranges, ((65, 90),)), intersect_ranges(ranges, ((97, 122),))
        moved = [(a + 32, b + 32) for a, b in upper] + [(a - 32, b - 32) for a, b in lower]
        return union_ranges(ranges, tuple(moved))


def _is_single_char(ranges: CharRanges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def parse_regex(pattern: str, wide: bool = False) -> RegexExpr:
    """The tree. Raises RequestError with what a grammar cannot follow, and where.

    wide: what any of the dialects takes, to be excluded; else what all of them take.
    """
    if len(pattern) > MAX_CHARS:
        raise RequestError(
            f"the regular expression has {len(pattern)} characters; the limit is {MAX_CHARS}"
        )
    if "\0" in pattern:
        raise RequestError("the regular expression holds a NUL character")
    node = _RegexParser(pattern, wide).whole_pattern()
    if (count := count_positions(node)) > MAX_POSITIONS:
        raise RequestError(
            f"the regular expression has {count} characters with its counts written out; "
            f"the limit is {MAX_POSITIONS}: make its counts smaller"
        )
    if (ways := _count_ways(node)[0]) > MAX_COUNT_WAYS:
        raise RequestError(
            f"the regular expression has counts within counts with nothing between them, {ways} "
            f"multiplied; the limit is {MAX_COUNT_WAYS}: put a separator there, or use * and +"
        )
    return node


# -- what a tree is -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def parse_search(pattern: str, wide: bool = False) -> RegexExpr:
    """The tree of a pattern that may match anywhere within a text: it matches the text as a whole.

    wide: as in parse_regex. Raises RequestError.
    """
    return without_anchors(parse_regex(pattern, wide))


def count_positions(node: RegexExpr) -> int:
    """Characters, counts written out."""
    if isinstance(node, RegexRepeat):
        return count_positions(node.part) * max(node.max_count or node.min_count, 1)
    if isinstance(node, RegexSequence | RegexAlternation):
        return sum(map(count_positions, node.parts))
    return int(isinstance(node, CharClass))


def _count_ways(node: RegexExpr) -> tuple[int, int]:
    """The greatest product of counts within each other that texts can reach in many ways, because
    nothing need be between the inner ones: within the node, and where it is repeated."""
    if isinstance(node, RegexRepeat):
        most, inner = _count_ways(node.part)
        again = inner * max(node.max_count or node.min_count, 1)
        return max(most, again if inner > 1 else 1), again
    if not isinstance(node, RegexSequence | RegexAlternation) or not node.parts:
        return 1, 1
    found = [_count_ways(part) for part in node.parts]
    needed = [bool((text_lengths(part) or (1, 1))[0]) for part in node.parts]
    is_choice = isinstance(node, RegexAlternation)
    ends = [
        again
        for (_, again), is_needed in zip(found, needed)
        if is_choice or sum(needed) == is_needed
    ]
    return max(most for most, _ in found), max(ends, default=1)


def literal_regex(value: str) -> RegexExpr:
    """Exactly this text."""
    return RegexSequence(tuple(CharClass(((ord(c), ord(c)),)) for c in value))


def text_lengths(node: RegexExpr) -> tuple[int, int | None] | None:
    """The fewest and the most characters of a text, or None if nothing matches."""
    if isinstance(node, CharClass):
        return (1, 1) if node.ranges else None
    if isinstance(node, RegexRepeat):
        inner = text_lengths(node.part)
        if inner is None or inner[1] == 0:
            return (0, 0) if node.min_count == 0 or inner else None
        endless = node.max_count is None or inner[1] is None
        return inner[0] * node.min_count, None if endless else (inner[1] or 0) * (
            node.max_count or 0
        )
    if isinstance(node, RegexAnchor):
        return 0, 0
    found = [text_lengths(one) for one in node.parts]
    if isinstance(node, RegexSequence):
        return _add_lengths([one for one in found if one]) if None not in found else None
    kept = [one for one in found if one]
    if not kept:
        return None
    tops = [most for _, most in kept]
    return min(least for least, _ in kept), None if None in tops else max(t or 0 for t in tops)


def _add_lengths(parts: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    tops = [most for _, most in parts]
    return sum(least for least, _ in parts), None if None in tops else sum(t or 0 for t in tops)


def has_anchor(node: RegexExpr) -> bool:
    """Whether the node contains ^ or $."""
    if isinstance(node, RegexRepeat):
        return has_anchor(node.part)
    if isinstance(node, RegexSequence | RegexAlternation):
        return any(map(has_anchor, node.parts))
    return isinstance(node, RegexAnchor)


# -- from searching to matching as a whole ------------------------------------------------------


def without_anchors(node: RegexExpr, search: bool = True) -> RegexExpr:
    """The node without anchors. search: it may match anywhere within the text, so that any text
    around it becomes part of it; False: it matches as a whole as it is."""
    return _expand_anchors(node, open_left=search, open_right=search)


def _expand_anchors(node: RegexExpr, *, open_left: bool, open_right: bool) -> RegexExpr:
    """Anchors at the ends dropped, and any text put where an open end has none."""
    parts = _flatten(node)
    while parts and parts[0] == RegexAnchor(False):
        parts, open_left = parts[1:], False
    while parts and parts[-1] == RegexAnchor(True):
        parts, open_right = parts[:-1], False
    options = _split_anchored_choice(parts)
    if options is not None:
        made = [_expand_anchors(one, open_left=open_left, open_right=open_right) for one in options]
        return RegexAlternation(tuple(made))
    if any(map(has_anchor, parts)):
        raise UnsupportedRegex(
            "the regular expression has ^ or $ in its middle; write them at its ends only"
        )
    before: list[RegexExpr] = [ANY_TEXT] if open_left else []
    after: list[RegexExpr] = [ANY_TEXT] if open_right and (parts or not open_left) else []
    return RegexSequence((*before, *parts, *after))


def _flatten(node: RegexExpr) -> tuple[RegexExpr, ...]:
    """The parts of a sequence, sequences within it opened."""
    if not isinstance(node, RegexSequence):
        return (node,)
    return tuple(part for one in node.parts for part in _flatten(one))


def _split_anchored_choice(parts: tuple[RegexExpr, ...]) -> list[RegexExpr] | None:
    """Alternatives of a sequence with a choice with an anchor as its first or last part."""
    for place in (0, -1):
        if not parts or not has_anchor(parts[place]):
            continue
        options = _options(parts[place])
        if options is None:
            return None
        rest = parts[1:] if place == 0 else parts[:-1]
        return [RegexSequence((one, *rest) if place == 0 else (*rest, one)) for one in options]
    return None


def _options(node: RegexExpr) -> tuple[RegexExpr, ...] | None:
    if isinstance(node, RegexAlternation):
        return node.parts
    if isinstance(node, RegexRepeat) and (node.min_count, node.max_count) == (0, 1):
        return node.part, EMPTY
    return None


# -- writing ------------------------------------------------------------------------------------


def to_pattern(node: RegexExpr) -> str:
    """The tree as a pattern, in a spelling that no two dialects read differently."""
    if isinstance(node, CharClass):
        return _class_text(node.ranges)
    if isinstance(node, RegexAnchor):
        return "$" if node.end else "^"
    if isinstance(node, RegexRepeat):
        return _grouped(node.part) + _count_text(node.min_count, node.max_count)
    if isinstance(node, RegexSequence):
        return "".join(
            f"(?:{to_pattern(p)})" if isinstance(p, RegexAlternation) else to_pattern(p)
            for p in node.parts
        )
    return "|".join(map(to_pattern, node.parts)) if node.parts else _class_text(())


def to_anchored_pattern(node: RegexExpr) -> str:
    """Of a node without anchors: the pattern that matches the same texts under search as well."""
    return f"^(?:{to_pattern(node)})$"


def _grouped(node: RegexExpr) -> str:
    return to_pattern(node) if isinstance(node, CharClass) else f"(?:{to_pattern(node)})"


def _count_text(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short is not None:
        return short
    if most is None:
        return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _class_text(ranges: CharRanges) -> str:
    if not ranges:
        raise RequestError("the regular expression has a class that no character is of")
    if _is_single_char(ranges):
        return _char_text(ranges[0][0])
    negated = complement_ranges(ranges)
    if not negated:
        return f"[\\x00-{chr(MAX_CODE_POINT)}]"
    if len(negated) < len(ranges) or ranges[-1][1] == MAX_CODE_POINT:
        return f"[^{_ranges_text(negated)}]"
    return f"[{_ranges_text(ranges)}]"


def _ranges_text(ranges: CharRanges) -> str:
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
