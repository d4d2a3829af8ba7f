"""Parses EBNF of the GBNF kind (`root ::= "a" | [0-9]+`) into rules.

    is_ebnf(text)      EBNF; otherwise the text is Lark
    Rules(text)        the rules, parsed and checked

It reads strings in either quotes, classes, `.`, groups, `* + ? {m,n}`, comments after `#` and
special tokens as `<name>` or `<[id]>`. A rule ends where the next begins, whatever the line breaks.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

from quire.errors import RequestError
from quire.grammar.automata import regex_ast

MAX_CHARS = 200_000
MAX_REGULAR_CHARS = 2_000
"""Characters of the regular expression that a whole grammar is, if its texts are to be closed."""
MAX_DEPTH = 100
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
class RuleRef:
    """A reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class SpecialTokenRef:
    """A special token, `<name>` or `<[id]>`."""

    name: str


@dataclass(frozen=True, slots=True)
class EbnfSequence:
    """One after the other."""

    parts: tuple[EbnfExpr, ...]


@dataclass(frozen=True, slots=True)
class EbnfAlternation:
    """One of them."""

    parts: tuple[EbnfExpr, ...]


@dataclass(frozen=True, slots=True)
class EbnfRepeat:
    """least times or more. most: None means without end."""

    part: EbnfExpr
    min_count: int
    max_count: int | None


EbnfExpr = (
    regex_ast.RegexExpr | RuleRef | SpecialTokenRef | EbnfSequence | EbnfAlternation | EbnfRepeat
)


def is_ebnf(text: str) -> bool:
    """Whether it defines rules by `::=`."""
    return _RULE.search(text) is not None


class EbnfGrammar:
    """The rules of a grammar, checked: each that is used is there, and a text of `root` can end.

    Raises RequestError.
    """

    def __init__(self, text: str, most: int) -> None:
        """most: characters of a regular expression that one expression may become."""
        if len(text) > MAX_CHARS:
            raise RequestError(f"the grammar has {len(text)} characters; {MAX_CHARS} are the most")
        self.by_name = _EbnfParser(text).rules()
        self._max_chars = most
        self._regex_by_rule: dict[str, regex_ast.RegexExpr | None] = {}
        if "root" not in self.by_name:
            raise RequestError("the grammar has no rule `root`")
        for name, rule in self.by_name.items():
            for used in _refs(rule):
                if used not in self.by_name:
                    raise RequestError(f"the grammar's `{name}` uses `{used}`, which is not a rule")
        self._check_terminates()
        for name, rule in self.by_name.items():
            self.by_name[name] = _unroll(name, rule)
        self._check_hidden_recursion()

    def _check_hidden_recursion(self) -> None:
        """Of `x ::= e x "a"` with an `e` that may be empty llguidance allows tokens that it then
        does not take."""
        empty: set[str] = set()
        while found := {
            name
            for name, rule in self.by_name.items()
            if name not in empty and _may_be_empty(rule, empty)
        }:
            empty |= found
        starts = {name: set(_first_rules(rule, empty)) for name, rule in self.by_name.items()}
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

    def _check_terminates(self) -> None:
        users: dict[str, list[str]] = {}
        for name, rule in self.by_name.items():
            for used in _refs(rule):
                users.setdefault(used, []).append(name)
        ending: set[str] = set()
        waiting = list(self.by_name)
        while waiting:
            name = waiting.pop()
            if name not in ending and _terminates(self.by_name[name], ending):
                ending.add(name)
                waiting += users.get(name, ())
        if "root" not in ending:
            raise RequestError("no text of the grammar ever ends: `root` always needs itself again")

    def to_regex(self, expr: EbnfExpr) -> regex_ast.RegexExpr | None:
        """The same as one regular expression, where it is not recursive, long, or has tokens."""
        if isinstance(expr, RuleRef):
            return self._rule(expr.name)
        if isinstance(expr, SpecialTokenRef):
            return None
        if isinstance(expr, EbnfRepeat):
            part = self.to_regex(expr.part)
            return (
                None
                if part is None
                else self._if_short(regex_ast.RegexRepeat(part, expr.min_count, expr.max_count))
            )
        if isinstance(expr, EbnfSequence | EbnfAlternation):
            parts = [self.to_regex(part) for part in expr.parts]
            known = tuple(part for part in parts if part is not None)
            if len(known) < len(parts):
                return None
            return self._if_short(
                regex_ast.RegexSequence(known)
                if isinstance(expr, EbnfSequence)
                else regex_ast.RegexAlternation(known)
            )
        return expr

    def _if_short(self, node: regex_ast.RegexExpr) -> regex_ast.RegexExpr | None:
        return node if regex_ast.count_positions(node) <= self._max_chars else None

    def _rule(self, name: str) -> regex_ast.RegexExpr | None:
        if name not in self._regex_by_rule:
            self._regex_by_rule[name] = (
                None  # while it is looked at: within itself it is not regular
            )
            self._regex_by_rule[name] = self.to_regex(self.by_name[name])
        return self._regex_by_rule[name]


def as_regex(text: str) -> regex_ast.RegexExpr | None:
    """A caller's grammar as one regular expression. None: it is Lark, recursive, or names tokens.

    Raises RequestError.
    """
    return EbnfGrammar(text, MAX_REGULAR_CHARS).to_regex(RuleRef("root")) if is_ebnf(text) else None


def may_be_cut_off(text: str) -> bool:
    """Whether no end is searched for its texts: it is Lark, recursive, or names special tokens."""
    if not is_ebnf(text):
        return True
    rules = EbnfGrammar(text, MAX_REGULAR_CHARS).by_name
    uses: dict[str, list[str]] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in uses:
            uses[name] = _refs(rules[name])
            waiting += uses[name]
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError:
        return True
    return any(map(_names_tokens, (rules[name] for name in uses)))


def _unroll(name: str, rule: EbnfExpr) -> EbnfExpr:
    """The rule without its own name, where that is only at the end, or only at the start.

    `x ::= a x | b` is `a* b`, and `x ::= x a | b` is `b a*`: how people write what repeats.
    """
    rows = [row for part in _options(rule) for row in _option_sequences(part, name)]
    bases = [row for row in rows if row and row != [RuleRef(name)] and RuleRef(name) not in row]
    bases += [row for row in rows if not row]
    for own, rest in ((-1, slice(None, -1)), (0, slice(1, None))):
        again = [row[rest] for row in rows if len(row) > 1 and row[own] == RuleRef(name)]
        plain = [part for row in (*again, *bases) for part in row]
        is_all = len(again) + len(bases) + rows.count([RuleRef(name)]) == len(rows)
        if again and is_all and not any(name in _refs(part) for part in plain):
            repeated = EbnfRepeat(_alternation(again), 0, None)
            first, last = (
                (repeated, _alternation(bases)) if own else (_alternation(bases), repeated)
            )
            return EbnfSequence((first, last))
    return rule


def _options(expr: EbnfExpr) -> list[EbnfExpr]:
    if isinstance(expr, EbnfAlternation):
        return [one for part in expr.parts for one in _options(part)]
    return [expr]


def _option_sequences(expr: EbnfExpr, name: str) -> list[list[EbnfExpr]]:
    """An option as parts in a row. With the rule itself perhaps at an end: with it and without."""
    row = _as_sequence(expr)
    for at in (-1, 0):
        perhaps = row[at] if row else None
        if isinstance(perhaps, EbnfRepeat) and perhaps == EbnfRepeat(RuleRef(name), 0, 1):
            without = row[:-1] if at else row[1:]
            return [[*without, RuleRef(name)] if at else [RuleRef(name), *without], without]
    return [row]


def _as_sequence(expr: EbnfExpr) -> list[EbnfExpr]:
    if isinstance(expr, EbnfSequence):
        return [one for part in expr.parts for one in _as_sequence(part)]
    return [] if expr == regex_ast.EMPTY else [expr]


def _alternation(rows: list[list[EbnfExpr]]) -> EbnfExpr:
    parts = tuple(row[0] if len(row) == 1 else EbnfSequence(tuple(row)) for row in rows)
    return parts[0] if len(parts) == 1 else EbnfAlternation(parts)


def _refs(expr: EbnfExpr) -> list[str]:
    if isinstance(expr, RuleRef):
        return [expr.name]
    if isinstance(expr, EbnfRepeat):
        return _refs(expr.part)
    if isinstance(expr, EbnfSequence | EbnfAlternation):
        return [name for part in expr.parts for name in _refs(part)]
    return []


def _names_tokens(expr: EbnfExpr) -> bool:
    if isinstance(expr, EbnfSequence | EbnfAlternation):
        return any(map(_names_tokens, expr.parts))
    return isinstance(expr, SpecialTokenRef) or (
        isinstance(expr, EbnfRepeat) and _names_tokens(expr.part)
    )


def _terminates(expr: EbnfExpr, ending: Set[str]) -> bool:
    """Whether a text of it can end, where those rules can."""
    if isinstance(expr, RuleRef):
        return expr.name in ending
    if isinstance(expr, EbnfRepeat):
        return expr.min_count == 0 or _terminates(expr.part, ending)
    if isinstance(expr, EbnfSequence):
        return all(_terminates(part, ending) for part in expr.parts)
    return not isinstance(expr, EbnfAlternation) or any(
        _terminates(part, ending) for part in expr.parts
    )


def _may_be_empty(expr: EbnfExpr, empty: Set[str]) -> bool:
    """Whether a text of it may have nothing in it, where those of these rules may."""
    if isinstance(expr, RuleRef):
        return expr.name in empty
    if isinstance(expr, SpecialTokenRef):
        return False
    if isinstance(expr, EbnfRepeat):
        return expr.min_count == 0 or _may_be_empty(expr.part, empty)
    if isinstance(expr, EbnfSequence):
        return all(_may_be_empty(part, empty) for part in expr.parts)
    if isinstance(expr, EbnfAlternation):
        return any(_may_be_empty(part, empty) for part in expr.parts)
    least = regex_ast.text_lengths(expr)
    return least is not None and least[0] == 0


def _first_rules(expr: EbnfExpr, empty: Set[str]) -> Iterator[tuple[str, bool]]:
    """Rules that its texts may begin with, and whether a part that may be empty comes before."""
    if isinstance(expr, RuleRef):
        yield expr.name, False
    elif isinstance(expr, EbnfRepeat):
        yield from _first_rules(expr.part, empty)
    elif isinstance(expr, EbnfAlternation):
        for part in expr.parts:
            yield from _first_rules(part, empty)
    elif isinstance(expr, EbnfSequence):
        behind = False
        for part in expr.parts:
            yield from ((name, hidden or behind) for name, hidden in _first_rules(part, empty))
            if not _may_be_empty(part, empty):
                break
            behind = True


class _EbnfParser:
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.kind, self.word = "", ""
        self.advance()

    def advance(self) -> None:
        while self.position < len(self.text):
            found = _TOKEN.match(self.text, self.position)
            if found is None:
                raise self.error("something that is not EBNF")
            self.start, self.position = self.position, found.end()
            if found.lastgroup != "skip":
                self.kind, self.word = found.lastgroup or "", found[0]
                return
        self.start = self.position
        self.kind = self.word = ""

    def error(self, what: str) -> RequestError:
        line = self.text.count("\n", 0, self.position) + 1
        near = self.text[self.position : self.position + 20]
        return RequestError(f"the grammar has {what} in line {line}, at {near!r}")

    def rules(self) -> dict[str, EbnfExpr]:
        found: dict[str, EbnfExpr] = {}
        while self.kind:
            if self.kind != "rule":
                raise self.error(
                    "something before its first rule" if not found else "a part too many"
                )
            name = self.word[:-3].strip()
            if name in found:
                raise RequestError(f"the grammar defines `{name}` twice")
            self.advance()
            found[name] = self.alternation()
        return found

    def alternation(self) -> EbnfExpr:
        parts = [self.sequence()]
        while self.word == "|" and self.kind == "sign":
            self.advance()
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else EbnfAlternation(tuple(parts))

    def sequence(self) -> EbnfExpr:
        parts: list[EbnfExpr] = []
        while self.kind in ("name", "text", "chars", "token") or (
            self.kind == "sign" and self.word in "(."
        ):
            parts.append(self.counted(self.atom()))
        return parts[0] if len(parts) == 1 else EbnfSequence(tuple(parts))

    def atom(self) -> EbnfExpr:
        kind, word = self.kind, self.word
        if word == "(" and kind == "sign":
            return self.group()
        self.advance()
        if kind == "name":
            return RuleRef(word)
        if kind == "token":
            return SpecialTokenRef(word)
        if kind == "text":
            return regex_ast.literal_regex(_unescape(word[1:-1]))
        if kind == "chars":
            return _char_class(word)
        return regex_ast.CharClass(regex_ast.complement_ranges(((10, 10), (13, 13))))

    def group(self) -> EbnfExpr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"more than {MAX_DEPTH} groups within each other")
        self.advance()
        inside = self.alternation()
        if self.word != ")" or self.kind != "sign":
            raise self.error("a bracket that is not closed")
        self.depth -= 1
        self.advance()
        return inside

    def counted(self, part: EbnfExpr) -> EbnfExpr:
        while True:
            if self.kind == "sign" and self.word in "*+?":
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self.word]
            elif self.kind == "count":
                least, most = self.count()
            else:
                return part
            part = EbnfRepeat(part, least, most)
            self.advance()

    def count(self) -> tuple[int, int | None]:
        low, comma, high = self.word[1:-1].replace(" ", "").partition(",")
        least = int(low or 0)
        most = int(high) if high else None if comma else least
        if (not low and not high) or (most is not None and most < least):
            raise self.error(f"the count {self.word}")
        return least, most


def _unescape(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        digits = found[1] or found[2] or found[3]
        if digits is None:
            return _LETTERS.get(found[4], found[4])
        point = int(digits, 16)
        if point > regex_ast.MAX_CODE_POINT or 0xD800 <= point < 0xE000:
            raise RequestError(f"the grammar has {found[0]}, which is not a character")
        return chr(point)

    return _ESCAPE.sub(one, text)


def _char_class(word: str) -> EbnfExpr:
    """A class: its escapes become characters, and a dash between two a range."""
    inner = word[1:-1]
    negated = inner.startswith("^")
    found = re.findall(
        r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|.", inner[negated:], re.DOTALL
    )
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(found):
        first = last = ord(_unescape(found[at]))
        if at + 2 < len(found) and found[at + 1] == "-":
            last = ord(_unescape(found[at + 2]))
            at += 2
        if last < first:
            raise RequestError(f"the grammar has the class {word:.40}, which has a range backwards")
        ranges.append((first, last))
        at += 1
    united = regex_ast.union_ranges(tuple(ranges))
    return regex_ast.CharClass(regex_ast.complement_ranges(united) if negated else united)
