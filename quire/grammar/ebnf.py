"""Grammars that callers write: EBNF of the GBNF kind (`root ::= "a" | [0-9]+`), read into rules.

    is_ebnf(text)      which of the two kinds of text it is: the other one is Lark
    Rules(text)        its rules, read and checked

Strings in either quotes, classes, `.`, groups, `* + ? {m,n}`, comments behind `#`, special tokens
as `<name>` or `<[id]>`. A rule ends where the next begins: line breaks mean nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

from quire.errors import RequestError
from quire.grammar import regex

MOST_CHARS = 200_000
MOST_REGULAR = 2_000
"""Characters of the regular expression that a whole grammar is, if its texts are to be closed."""
MOST_DEPTH = 100
"""Groups within groups."""
_RULE = re.compile(r"(?m)^\s*[A-Za-z_][\w-]*\s*::=")
_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<rule>[A-Za-z_][\w-]*\s*::=)
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<chars>\[(?:[^\]\\]|\\.)*\])
      | (?P<count>\{\s*\d*\s*,?\s*\d*\s*\})
      | (?P<token><(?:\[\d+\]|[^\s<>]+)>)
      | (?P<sign>[()|*+?.])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}


@dataclass(frozen=True, slots=True)
class Ref:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A special token, `<name>` or `<[id]>`."""

    name: str


@dataclass(frozen=True, slots=True)
class Cat:
    """One after the other."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """One of them."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """least times or more. most: None means without end."""

    part: Expr
    least: int
    most: int | None


Expr = regex.Node | Ref | Token | Cat | Or | Times


def is_ebnf(text: str) -> bool:
    """Whether it defines rules by `::=`."""
    return _RULE.search(text) is not None


class Rules:
    """The rules of a grammar, checked: each that is used is there, and a text of `root` can end.

    Raises RequestError.
    """

    def __init__(self, text: str, most: int) -> None:
        """most: characters of a regular expression that one expression may become."""
        if len(text) > MOST_CHARS:
            raise RequestError(f"the grammar has {len(text)} characters; {MOST_CHARS} are the most")
        self.by_name = _Reader(text).rules()
        self._most = most
        self._known: dict[str, regex.Node | None] = {}
        if "root" not in self.by_name:
            raise RequestError("the grammar has no rule `root`")
        for name, rule in self.by_name.items():
            for used in _refs(rule):
                if used not in self.by_name:
                    raise RequestError(f"the grammar's `{name}` uses `{used}`, which is no rule")
        self._refuse_endless()
        for name, rule in self.by_name.items():
            self.by_name[name] = _unrolled(name, rule)
        self._refuse_hidden_recursion()

    def _refuse_hidden_recursion(self) -> None:
        """Of `x ::= e x "a"` with an `e` that may be empty llguidance allows tokens that it then
        does not take."""
        empty: set[str] = set()
        while found := {
            name
            for name, rule in self.by_name.items()
            if name not in empty and _may_be_empty(rule, empty)
        }:
            empty |= found
        starts = {name: set(_starts(rule, empty)) for name, rule in self.by_name.items()}
        for name, begins in starts.items():
            for used in [used for used, hidden in begins if hidden]:
                seen, waiting = {used}, [used]
                while waiting:
                    further = {one for one, _ in starts[waiting.pop()]} - seen
                    seen |= further
                    waiting += further
                if name in seen:
                    raise RequestError(
                        f"the grammar's `{name}` comes back to itself behind what may be empty: "
                        "leave out what may be empty there, or put it elsewhere"
                    )

    def _refuse_endless(self) -> None:
        users: dict[str, list[str]] = {}
        for name, rule in self.by_name.items():
            for used in _refs(rule):
                users.setdefault(used, []).append(name)
        ending: set[str] = set()
        waiting = list(self.by_name)
        while waiting:
            name = waiting.pop()
            if name not in ending and _ends(self.by_name[name], ending):
                ending.add(name)
                waiting += users.get(name, ())
        if "root" not in ending:
            raise RequestError("no text of the grammar ever ends: `root` always needs itself again")

    def regular(self, expr: Expr) -> regex.Node | None:
        """The same as one regular expression, where it is not recursive, long, or has tokens."""
        if isinstance(expr, Ref):
            return self._rule(expr.name)
        if isinstance(expr, Token):
            return None
        if isinstance(expr, Times):
            part = self.regular(expr.part)
            return None if part is None else self._short(regex.Repeat(part, expr.least, expr.most))
        if isinstance(expr, Cat | Or):
            parts = [self.regular(part) for part in expr.parts]
            known = tuple(part for part in parts if part is not None)
            if len(known) < len(parts):
                return None
            return self._short(regex.Seq(known) if isinstance(expr, Cat) else regex.Alt(known))
        return expr

    def _short(self, node: regex.Node) -> regex.Node | None:
        return node if regex.positions(node) <= self._most else None

    def _rule(self, name: str) -> regex.Node | None:
        if name not in self._known:
            self._known[name] = None  # while it is looked at: within itself it is not regular
            self._known[name] = self.regular(self.by_name[name])
        return self._known[name]


def as_regex(text: str) -> regex.Node | None:
    """A caller's grammar as one regular expression. None: it is Lark, recursive, or names tokens.

    Raises RequestError.
    """
    return Rules(text, MOST_REGULAR).regular(Ref("root")) if is_ebnf(text) else None


def _unrolled(name: str, rule: Expr) -> Expr:
    """The rule without its own name, where that stands only at the end, or only at the start.

    `x ::= a x | b` is `a* b`, and `x ::= x a | b` is `b a*`: how people write what repeats.
    """
    rows = [row for part in _options(rule) for row in _rows(part, name)]
    bases = [row for row in rows if row and row != [Ref(name)] and Ref(name) not in row]
    bases += [row for row in rows if not row]
    for own, rest in ((-1, slice(None, -1)), (0, slice(1, None))):
        again = [row[rest] for row in rows if len(row) > 1 and row[own] == Ref(name)]
        plain = [part for row in (*again, *bases) for part in row]
        is_all = len(again) + len(bases) + rows.count([Ref(name)]) == len(rows)
        if again and is_all and not any(name in _refs(part) for part in plain):
            repeated = Times(_either(again), 0, None)
            first, last = (repeated, _either(bases)) if own else (_either(bases), repeated)
            return Cat((first, last))
    return rule


def _options(expr: Expr) -> list[Expr]:
    if isinstance(expr, Or):
        return [one for part in expr.parts for one in _options(part)]
    return [expr]


def _rows(expr: Expr, name: str) -> list[list[Expr]]:
    """An option as parts in a row. With the rule itself perhaps at an end: with it and without."""
    row = _row(expr)
    for at in (-1, 0):
        perhaps = row[at] if row else None
        if isinstance(perhaps, Times) and perhaps == Times(Ref(name), 0, 1):
            without = row[:-1] if at else row[1:]
            return [[*without, Ref(name)] if at else [Ref(name), *without], without]
    return [row]


def _row(expr: Expr) -> list[Expr]:
    if isinstance(expr, Cat):
        return [one for part in expr.parts for one in _row(part)]
    return [] if expr == regex.EMPTY else [expr]


def _either(rows: list[list[Expr]]) -> Expr:
    parts = tuple(row[0] if len(row) == 1 else Cat(tuple(row)) for row in rows)
    return parts[0] if len(parts) == 1 else Or(parts)


def _refs(expr: Expr) -> list[str]:
    if isinstance(expr, Ref):
        return [expr.name]
    if isinstance(expr, Times):
        return _refs(expr.part)
    if isinstance(expr, Cat | Or):
        return [name for part in expr.parts for name in _refs(part)]
    return []


def _ends(expr: Expr, ending: Set[str]) -> bool:
    """Whether a text of it can end, where those rules can."""
    if isinstance(expr, Ref):
        return expr.name in ending
    if isinstance(expr, Times):
        return expr.least == 0 or _ends(expr.part, ending)
    if isinstance(expr, Cat):
        return all(_ends(part, ending) for part in expr.parts)
    return not isinstance(expr, Or) or any(_ends(part, ending) for part in expr.parts)


def _may_be_empty(expr: Expr, empty: Set[str]) -> bool:
    """Whether a text of it may have nothing in it, where those of these rules may."""
    if isinstance(expr, Ref):
        return expr.name in empty
    if isinstance(expr, Token):
        return False
    if isinstance(expr, Times):
        return expr.least == 0 or _may_be_empty(expr.part, empty)
    if isinstance(expr, Cat):
        return all(_may_be_empty(part, empty) for part in expr.parts)
    if isinstance(expr, Or):
        return any(_may_be_empty(part, empty) for part in expr.parts)
    least = regex.lengths(expr)
    return least is not None and least[0] == 0


def _starts(expr: Expr, empty: Set[str]) -> Iterator[tuple[str, bool]]:
    """Rules that its texts may begin with, and whether something stands before that is empty."""
    if isinstance(expr, Ref):
        yield expr.name, False
    elif isinstance(expr, Times):
        yield from _starts(expr.part, empty)
    elif isinstance(expr, Or):
        for part in expr.parts:
            yield from _starts(part, empty)
    elif isinstance(expr, Cat):
        behind = False
        for part in expr.parts:
            yield from ((name, hidden or behind) for name, hidden in _starts(part, empty))
            if not _may_be_empty(part, empty):
                break
            behind = True


class _Reader:
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.kind, self.word = "", ""
        self.advance()

    def advance(self) -> None:
        while self.at < len(self.text):
            found = _TOKEN.match(self.text, self.at)
            if found is None:
                raise self.wrong("what is no part of EBNF")
            self.start, self.at = self.at, found.end()
            if found.lastgroup != "skip":
                self.kind, self.word = found.lastgroup or "", found[0]
                return
        self.start = self.at
        self.kind = self.word = ""

    def wrong(self, what: str) -> RequestError:
        line = self.text.count("\n", 0, self.at) + 1
        near = self.text[self.at : self.at + 20]
        return RequestError(f"the grammar has {what} in line {line}, at {near!r}")

    def rules(self) -> dict[str, Expr]:
        found: dict[str, Expr] = {}
        while self.kind:
            if self.kind != "rule":
                raise self.wrong(
                    "something before its first rule" if not found else "a part too many"
                )
            name = self.word[:-3].strip()
            if name in found:
                raise RequestError(f"the grammar defines `{name}` twice")
            self.advance()
            found[name] = self.either()
        return found

    def either(self) -> Expr:
        parts = [self.sequence()]
        while self.word == "|" and self.kind == "sign":
            self.advance()
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def sequence(self) -> Expr:
        parts: list[Expr] = []
        while self.kind in ("name", "text", "chars", "token") or (
            self.kind == "sign" and self.word in "(."
        ):
            parts.append(self.counted(self.atom()))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def atom(self) -> Expr:
        kind, word = self.kind, self.word
        if word == "(" and kind == "sign":
            return self.group()
        self.advance()
        if kind == "name":
            return Ref(word)
        if kind == "token":
            return Token(word)
        if kind == "text":
            return regex.literal(_unescaped(word[1:-1]))
        if kind == "chars":
            return _chars(word)
        return regex.Chars(regex.others(((10, 10), (13, 13))))

    def group(self) -> Expr:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.wrong(f"more than {MOST_DEPTH} groups within each other")
        self.advance()
        inside = self.either()
        if self.word != ")" or self.kind != "sign":
            raise self.wrong("a bracket that is not closed")
        self.depth -= 1
        self.advance()
        return inside

    def counted(self, part: Expr) -> Expr:
        while True:
            if self.kind == "sign" and self.word in "*+?":
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self.word]
            elif self.kind == "count":
                least, most = self.count()
            else:
                return part
            part = Times(part, least, most)
            self.advance()

    def count(self) -> tuple[int, int | None]:
        low, comma, high = self.word[1:-1].replace(" ", "").partition(",")
        least = int(low or 0)
        most = int(high) if high else None if comma else least
        if (not low and not high) or (most is not None and most < least):
            raise self.wrong(f"the count {self.word}")
        return least, most


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        digits = found[1] or found[2] or found[3]
        if digits is None:
            return _LETTERS.get(found[4], found[4])
        point = int(digits, 16)
        if point > regex.TOP or 0xD800 <= point < 0xE000:
            raise RequestError(f"the grammar has {found[0]}, which is no character")
        return chr(point)

    return _ESCAPE.sub(one, text)


def _chars(word: str) -> Expr:
    """A class: its escapes become characters, and a dash between two a range."""
    inner = word[1:-1]
    negated = inner.startswith("^")
    found = re.findall(
        r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|.", inner[negated:], re.DOTALL
    )
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(found):
        first = last = ord(_unescaped(found[at]))
        if at + 2 < len(found) and found[at + 1] == "-":
            last = ord(_unescaped(found[at + 2]))
            at += 2
        if last < first:
            raise RequestError(f"the grammar has the class {word:.40}, which has a range backwards")
        ranges.append((first, last))
        at += 1
    united = regex.union(tuple(ranges))
    return regex.Chars(regex.others(united) if negated else united)
