"""Regular expressions beside other parts of a grammar, for a reader that reads lexemes.

llguidance reads each lexeme as far as it goes: one that another begins with is lost where both may
stand. So text that is narrow (few characters at each place) is spelled out, each character a
lexeme, of which none begins another; and what is wide is joined with as much of what follows it as
makes clear where it ends.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence

from quire.grammar import regex, texts
from quire.grammar.regex import Alt, Chars, Node, Ranges, Seq

MOST_SPELLED = 1_000
"""Characters of a regular form that is written out beside others."""
MOST_WIDTH = 4
"""Characters at one place, to be narrow."""
MOST_LOOKED_AT = 200
"""Characters of an expression whose end is looked for."""


class Lexemes:
    """Writes expressions; `lexeme` names a terminal."""

    def __init__(self, lexeme: Callable[[Node], str]) -> None:
        self._lexeme = lexeme

    def within(self, parts: Iterable[Node]) -> str:
        """Parts in a row, beside others."""
        known = list(flat(parts))
        expression, _ = self._row(known)
        if expression is not None:
            return expression
        fixed = list(itertools.takewhile(is_narrow, known))
        if any(map(nullable, fixed)):
            fixed = []
        rest = self._lexeme(Seq(tuple(known[len(fixed) :])))
        return " ".join([*map(self._spell, fixed), rest])

    def either(self, nodes: Sequence[Node]) -> str:
        """Alternatives, beside others: in one lexeme where one of them begins as another does."""
        rows = [list(flat([node])) for node in nodes]
        expressions = [self._row(row)[0] for row in rows]
        known = [expression for expression in expressions if expression is not None]
        if len(known) == len(rows) and not _clash(rows):
            return " | ".join(known)
        return self.within([Alt(tuple(nodes))])

    def is_clear(self, parts: Iterable[Node]) -> bool:
        """Whether a row of parts says itself where it ends."""
        expression, is_clear = self._row(list(flat(parts)))
        return expression is not None and is_clear

    def _row(self, parts: Sequence[Node]) -> tuple[str | None, bool]:
        """(the expression, whether it is clear where it ends). None: a part that may be missing
        begins like the lexeme behind it."""
        made: list[str] = []
        missing: Ranges = ()  # what parts that may be missing, just before, begin with
        is_clear = True
        at = 0
        while at < len(parts):
            one = parts[at]
            built = self._built(one)
            if built is None:
                end = _clear_end(parts, at)
                one = Seq(tuple(parts[at:end]))
                is_clear = is_prefix_free(one)
                built = self._lexeme(one)
                if regex.common(missing, first(one)):
                    return None, False
                at = end
            else:
                at += 1
            made.append(built)
            missing = regex.union(missing, first(one)) if nullable(one) else ()
        return " ".join(made) or '""', is_clear

    def _built(self, node: Node) -> str | None:
        """A part that others may stand beside as they like; None: it must be a lexeme."""
        if is_narrow(node):
            return self._spell(node) if regex.positions(node) <= MOST_SPELLED else None
        if isinstance(node, Seq):
            expression, is_clear = self._row(list(flat(node.parts)))
            return expression if is_clear and is_narrow_first(node) else None
        if isinstance(node, Alt) and is_narrow_first(node):
            parts = [self._built(part) for part in node.parts]
            known = [part for part in parts if part is not None]
            return f"({' | '.join(known)})" if len(known) == len(parts) else None
        if isinstance(node, regex.Repeat) and node.most != 0 and is_narrow_first(node.part):
            part = self._built(node.part)
            return None if part is None else f"({part}){count(node.least, node.most)}"
        return None

    def _spell(self, node: Node) -> str:
        if isinstance(node, Chars):
            each = [chr(at) for first, last in node.ranges for at in range(first, last + 1)]
            return "(" + " | ".join(map(json.dumps, each)) + ")" if len(each) > 1 else spelled(each)
        if isinstance(node, regex.Repeat):
            part = self._spell(node.part)
            return f"({part}){count(node.least, node.most)}" if node.most else '""'
        if isinstance(node, Alt):
            return "(" + " | ".join(map(self._spell, node.parts)) + ")"
        assert isinstance(node, Seq)
        return " ".join(map(self._spell, node.parts)) or '""'


def spelled(text: Iterable[str]) -> str:
    """Character by character."""
    return " ".join(map(json.dumps, text))


def count(least: int, most: int | None) -> str:
    """How often what stands before it is repeated; at most 0 times is none of Lark's counts."""
    return f"{{{max(least, 0)},{'' if most is None else most}}}"


def flat(nodes: Iterable[Node]) -> Iterable[Node]:
    """Sequences within a sequence, opened."""
    for node in nodes:
        if isinstance(node, Seq):
            yield from flat(node.parts)
        else:
            yield node


def is_narrow(node: Node) -> bool:
    """Whether few characters may stand at each place, and the text has an end."""
    if isinstance(node, Chars):
        return 0 < sum(last - first + 1 for first, last in node.ranges) <= MOST_WIDTH
    if isinstance(node, regex.Repeat):
        return node.most is not None and is_narrow(node.part)
    return isinstance(node, Seq | Alt) and all(map(is_narrow, node.parts))


def is_narrow_first(node: Node) -> bool:
    """Whether it begins with a narrow part that cannot be missing."""
    if isinstance(node, Seq):
        return bool(node.parts) and is_narrow_first(node.parts[0])
    if isinstance(node, Alt):
        return bool(node.parts) and all(map(is_narrow_first, node.parts))
    if isinstance(node, regex.Repeat):
        return node.least > 0 and is_narrow_first(node.part)
    return is_narrow(node)


def nullable(node: Node) -> bool:
    """Whether the empty text is one of its."""
    if isinstance(node, regex.Repeat):
        return node.least == 0 or nullable(node.part)
    if isinstance(node, Seq):
        return all(map(nullable, node.parts))
    return isinstance(node, Alt) and any(map(nullable, node.parts))


def first(node: Node) -> Ranges:
    """Characters that its texts begin with."""
    if isinstance(node, Chars):
        return node.ranges
    if isinstance(node, regex.Repeat):
        return first(node.part)
    found: Ranges = ()
    for part in node.parts if isinstance(node, Seq | Alt) else ():
        found = regex.union(found, first(part))
        if isinstance(node, Seq) and not nullable(part):
            break
    return found


def _clash(rows: Sequence[Sequence[Node]]) -> bool:
    """Whether a lexeme that one of them begins with goes on where another has ended."""
    heads = [_head(row) for row in rows]
    for head, row in zip(heads, rows):
        for other, beside in zip(heads, rows):
            is_wide = head is not None and head != other
            if is_wide and regex.common(first(Seq(tuple(row))), first(Seq(tuple(beside)))):
                return True
    return False


def _head(row: Sequence[Node]) -> tuple[Node, ...] | None:
    """The lexeme that a row begins with; None: it is a character."""
    if not row or is_narrow_first(row[0]):
        return None
    return tuple(row[: _clear_end(row, 0)])


def _clear_end(parts: Sequence[Node], at: int) -> int:
    """How far a lexeme from there must go, to make clear where it ends; all, if nothing does."""
    for end in range(at + 1, len(parts)):
        if is_prefix_free(Seq(tuple(parts[at:end]))):
            return end
    return len(parts)


@functools.lru_cache(maxsize=256)
def is_prefix_free(node: Node) -> bool:
    """Whether no text of it begins another."""
    lengths = regex.lengths(node)
    if lengths is None or lengths[0] == lengths[1]:
        return True
    if regex.positions(node) > MOST_LOOKED_AT:
        return False
    longer = Seq((node, regex.Repeat(Chars(regex.ALL), 1, None)))
    try:
        return not texts.meet(node, longer)
    except texts.TooComplex:
        return False
