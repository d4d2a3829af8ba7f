"""Writes regular expressions as lexemes of llguidance that can be next to other parts.

llguidance reads each lexeme as far as possible: one lexeme is lost where another begins with it. So
narrow text (few characters at each place) is spelled out with one lexeme for each character, and
wide text is joined with as much of what follows as makes its end clear.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence

from quire.grammar.automata import dfa, regex_ast
from quire.grammar.automata.regex_ast import (
    CharClass,
    CharRanges,
    RegexAlternation,
    RegexExpr,
    RegexSequence,
)

MAX_SPELLED_CHARS = 1_000
"""Characters of a regular form that is written out beside others."""
MAX_WIDTH = 4
"""Characters at one place, to be narrow."""
MAX_INSPECTED = 200
"""Characters of an expression in which a clear end is searched."""


class LexemeWriter:
    """Writes expressions; `lexeme` names a terminal."""

    def __init__(self, lexeme: Callable[[RegexExpr], str]) -> None:
        self._lexeme = lexeme

    def sequence(self, parts: Iterable[RegexExpr]) -> str:
        """Parts in a row, beside others."""
        known = list(flatten(parts))
        expression, _ = self._write_sequence(known)
        if expression is not None:
            return expression
        fixed = list(itertools.takewhile(is_narrow, known))
        if any(map(is_nullable, fixed)):
            fixed = []
        rest = self._lexeme(RegexSequence(tuple(known[len(fixed) :])))
        return " ".join([*map(self._write_chars, fixed), rest])

    def alternation(self, nodes: Sequence[RegexExpr]) -> str:
        """Alternatives, beside others: in one lexeme where one of them begins as another does."""
        rows = [list(flatten([node])) for node in nodes]
        expressions = [self._write_sequence(row)[0] for row in rows]
        known = [expression for expression in expressions if expression is not None]
        if len(known) == len(rows) and not _lexemes_overlap(rows):
            return " | ".join(known)
        return self.sequence([RegexAlternation(tuple(nodes))])

    def has_clear_end(self, parts: Iterable[RegexExpr]) -> bool:
        """Whether a row of parts has a clear end."""
        expression, has_clear_end = self._write_sequence(list(flatten(parts)))
        return expression is not None and has_clear_end

    def _write_sequence(self, parts: Sequence[RegexExpr]) -> tuple[str | None, bool]:
        """(the expression, whether it is clear where it ends). None: a part that may be missing
        begins like the lexeme behind it."""
        made: list[str] = []
        missing: CharRanges = ()  # what parts that may be missing, just before, begin with
        has_clear_end = True
        at = 0
        while at < len(parts):
            one = parts[at]
            built = self._write_inline(one)
            if built is None:
                end = _clear_end(parts, at)
                one = RegexSequence(tuple(parts[at:end]))
                has_clear_end = is_prefix_free(one)
                built = self._lexeme(one)
                if regex_ast.intersect_ranges(missing, first_chars(one)):
                    return None, False
                at = end
            else:
                at += 1
            made.append(built)
            missing = regex_ast.union_ranges(missing, first_chars(one)) if is_nullable(one) else ()
        return " ".join(made) or '""', has_clear_end

    def _write_inline(self, node: RegexExpr) -> str | None:
        """A part that can be next to any other; None: it must be a lexeme."""
        if is_narrow(node):
            return (
                self._write_chars(node)
                if regex_ast.count_positions(node) <= MAX_SPELLED_CHARS
                else None
            )
        if isinstance(node, RegexSequence):
            expression, has_clear_end = self._write_sequence(list(flatten(node.parts)))
            return expression if has_clear_end and is_narrow_first(node) else None
        if isinstance(node, RegexAlternation) and is_narrow_first(node):
            parts = [self._write_inline(part) for part in node.parts]
            known = [part for part in parts if part is not None]
            return f"({' | '.join(known)})" if len(known) == len(parts) else None
        if (
            isinstance(node, regex_ast.RegexRepeat)
            and node.max_count != 0
            and is_narrow_first(node.part)
        ):
            part = self._write_inline(node.part)
            return None if part is None else f"({part}){lark_count(node.min_count, node.max_count)}"
        return None

    def _write_chars(self, node: RegexExpr) -> str:
        if isinstance(node, CharClass):
            each = [chr(at) for first, last in node.ranges for at in range(first, last + 1)]
            return (
                "(" + " | ".join(map(json.dumps, each)) + ")"
                if len(each) > 1
                else spell_chars(each)
            )
        if isinstance(node, regex_ast.RegexRepeat):
            part = self._write_chars(node.part)
            return (
                f"({part}){lark_count(node.min_count, node.max_count)}" if node.max_count else '""'
            )
        if isinstance(node, RegexAlternation):
            return "(" + " | ".join(map(self._write_chars, node.parts)) + ")"
        assert isinstance(node, RegexSequence)
        return " ".join(map(self._write_chars, node.parts)) or '""'


def spell_chars(text: Iterable[str]) -> str:
    """Character by character."""
    return " ".join(map(json.dumps, text))


def lark_count(least: int, most: int | None) -> str:
    """The count of the part before it; Lark has no count of at most 0."""
    return f"{{{max(least, 0)},{'' if most is None else most}}}"


def flatten(nodes: Iterable[RegexExpr]) -> Iterable[RegexExpr]:
    """Sequences within a sequence, opened."""
    for node in nodes:
        if isinstance(node, RegexSequence):
            yield from flatten(node.parts)
        else:
            yield node


def is_narrow(node: RegexExpr) -> bool:
    """Whether few characters are possible at each place, and the text has an end."""
    if isinstance(node, CharClass):
        return 0 < sum(last - first + 1 for first, last in node.ranges) <= MAX_WIDTH
    if isinstance(node, regex_ast.RegexRepeat):
        return node.max_count is not None and is_narrow(node.part)
    return isinstance(node, RegexSequence | RegexAlternation) and all(map(is_narrow, node.parts))


def is_narrow_first(node: RegexExpr) -> bool:
    """Whether it begins with a narrow part that cannot be missing."""
    if isinstance(node, RegexSequence):
        return bool(node.parts) and is_narrow_first(node.parts[0])
    if isinstance(node, RegexAlternation):
        return bool(node.parts) and all(map(is_narrow_first, node.parts))
    if isinstance(node, regex_ast.RegexRepeat):
        return node.min_count > 0 and is_narrow_first(node.part)
    return is_narrow(node)


def is_nullable(node: RegexExpr) -> bool:
    """Whether the empty text is one of its."""
    if isinstance(node, regex_ast.RegexRepeat):
        return node.min_count == 0 or is_nullable(node.part)
    if isinstance(node, RegexSequence):
        return all(map(is_nullable, node.parts))
    return isinstance(node, RegexAlternation) and any(map(is_nullable, node.parts))


def first_chars(node: RegexExpr) -> CharRanges:
    """Characters that its texts begin with."""
    if isinstance(node, CharClass):
        return node.ranges
    if isinstance(node, regex_ast.RegexRepeat):
        return first_chars(node.part)
    found: CharRanges = ()
    for part in node.parts if isinstance(node, RegexSequence | RegexAlternation) else ():
        found = regex_ast.union_ranges(found, first_chars(part))
        if isinstance(node, RegexSequence) and not is_nullable(part):
            break
    return found


def _lexemes_overlap(rows: Sequence[Sequence[RegexExpr]]) -> bool:
    """Whether a lexeme that one of them begins with is longer than another."""
    heads = [_first_lexeme(row) for row in rows]
    for head, row in zip(heads, rows):
        for other, beside in zip(heads, rows):
            is_wide = head is not None and head != other
            if is_wide and regex_ast.intersect_ranges(
                first_chars(RegexSequence(tuple(row))), first_chars(RegexSequence(tuple(beside)))
            ):
                return True
    return False


def _first_lexeme(row: Sequence[RegexExpr]) -> tuple[RegexExpr, ...] | None:
    """The lexeme that a row begins with; None: it is a character."""
    if not row or is_narrow_first(row[0]):
        return None
    return tuple(row[: _clear_end(row, 0)])


def _clear_end(parts: Sequence[RegexExpr], at: int) -> int:
    """How far a lexeme from there must go, to make clear where it ends; all, if nothing does."""
    for end in range(at + 1, len(parts)):
        if is_prefix_free(RegexSequence(tuple(parts[at:end]))):
            return end
    return len(parts)


@functools.lru_cache(maxsize=256)
def is_prefix_free(node: RegexExpr) -> bool:
    """Whether no text of it begins another."""
    lengths = regex_ast.text_lengths(node)
    if lengths is None or lengths[0] == lengths[1]:
        return True
    if regex_ast.count_positions(node) > MAX_INSPECTED:
        return False
    longer = RegexSequence((node, regex_ast.RegexRepeat(CharClass(regex_ast.ALL_CHARS), 1, None)))
    try:
        return not dfa.intersects(node, longer)
    except dfa.DfaTooComplex:
        return False
