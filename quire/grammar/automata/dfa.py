"""Deterministic automata of regular expressions: intersection, difference, matching.

RegexDfa builds its states as it is walked: each state is a tuple of state sets, one for each
expression. Its size is bounded; a larger one raises DfaTooComplex, which means that the question
stays open, and not that the expression is wrong.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterator, Sequence

from quire.grammar.automata import regex_ast
from quire.grammar.automata.regex_ast import (
    CharClass,
    CharRanges,
    RegexAlternation,
    RegexExpr,
    RegexRepeat,
    RegexSequence,
)

MAX_POSITIONS = 3_000
"""Characters of an expression, counts written out."""
MAX_STATES = 600
MAX_EDGES = 20_000
MAX_PARTS = 3_000
"""Pieces of an expression that is made from an automaton."""

DfaState = tuple[frozenset[int], ...]


class DfaTooComplex(Exception):
    """The automaton has too many states to decide a question."""


class _Nfa:
    """One expression as a non-deterministic automaton; 0 is where it starts."""

    def __init__(self, node: RegexExpr) -> None:
        if regex_ast.count_positions(node) > MAX_POSITIONS:
            raise DfaTooComplex
        self.epsilon_edges: list[list[int]] = [[]]
        self.edges: list[list[tuple[CharRanges, int]]] = [[]]
        self.end = self.add(node, 0)
        self.start = self.epsilon_closure([0])

    def state(self) -> int:
        if len(self.epsilon_edges) > 8 * MAX_POSITIONS:
            raise DfaTooComplex
        self.epsilon_edges.append([])
        self.edges.append([])
        return len(self.epsilon_edges) - 1

    def add(self, node: RegexExpr, start: int) -> int:
        """The state in which the node, begun in `start`, is over."""
        if isinstance(node, CharClass):
            end = self.state()
            self.edges[start].append((node.ranges, end))
            return end
        if isinstance(node, RegexSequence):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, RegexAlternation):
            end = self.state()
            for part in node.parts:
                self.epsilon_edges[self.add(part, start)].append(end)
            return end
        assert isinstance(node, RegexRepeat), f"{node!r} has no automaton"
        return self.add_repeat(node, start)

    def add_repeat(self, node: RegexRepeat, start: int) -> int:
        for _ in range(node.min_count):
            start = self.add(node.part, start)
        if node.max_count is None:
            again = self.state()
            self.epsilon_edges[start].append(again)
            self.epsilon_edges[self.add(node.part, again)].append(again)
            return again
        end = self.state()
        for _ in range(node.max_count - node.min_count):
            self.epsilon_edges[start].append(end)
            start = self.add(node.part, start)
        self.epsilon_edges[start].append(end)
        return end

    def epsilon_closure(self, states: Sequence[int]) -> frozenset[int]:
        found = set(states)
        todo = list(states)
        while todo:
            for one in self.epsilon_edges[todo.pop()]:
                if one not in found:
                    found.add(one)
                    todo.append(one)
        return frozenset(found)


class RegexDfa:
    """Texts that match all of `all_of` and none of `none_of`: nodes without anchors."""

    def __init__(self, all_of: Sequence[RegexExpr], none_of: Sequence[RegexExpr] = ()) -> None:
        self._nfas = [_build_nfa(node) for node in (*all_of, *none_of)]
        self._wanted = len(all_of)
        self.start: DfaState = tuple(net.start for net in self._nfas)
        self._transitions: dict[DfaState, list[tuple[CharRanges, DfaState]]] = {}
        self._edges = 0

    def is_accepting(self, place: DfaState) -> bool:
        """A text that leads here is of the set."""
        over = [net.end in states for net, states in zip(self._nfas, place, strict=True)]
        return all(over[: self._wanted]) and not any(over[self._wanted :])

    def transitions(self, place: DfaState) -> list[tuple[CharRanges, DfaState]]:
        """Which characters lead where. Those that lead nowhere are left out."""
        known = self._transitions.get(place)
        if known is None:
            known = self._transitions[place] = list(self._build_transitions(place))
            self._edges += len(known)
            if self._edges > MAX_EDGES:
                raise DfaTooComplex
        return known

    def _build_transitions(self, place: DfaState) -> Iterator[tuple[CharRanges, DfaState]]:
        found: dict[DfaState, list[tuple[int, int]]] = {}
        for first, last, reached in self._partition_alphabet(place):
            to = tuple(
                net.epsilon_closure(sorted(states)) if states else frozenset()
                for net, states in zip(self._nfas, reached, strict=True)
            )
            if all(to[: self._wanted]):
                found.setdefault(to, []).append((first, last))
        for to, pieces in found.items():
            yield regex_ast.union_ranges(tuple(pieces)), to

    def _partition_alphabet(self, place: DfaState) -> Iterator[tuple[int, int, list[set[int]]]]:
        """The alphabet, cut where an edge begins or ends."""
        changes: dict[int, list[tuple[int, int, bool]]] = {0: [], 0xD800: [], 0xE000: []}
        for number, (net, states) in enumerate(zip(self._nfas, place, strict=True)):
            for ranges, to in (edge for state in states for edge in net.edges[state]):
                for first, last in ranges:
                    changes.setdefault(first, []).append((number, to, True))
                    changes.setdefault(last + 1, []).append((number, to, False))
        live: list[dict[int, int]] = [{} for _ in self._nfas]
        cuts = sorted(changes)
        for cut, after in zip(cuts, [*cuts[1:], regex_ast.MAX_CODE_POINT + 1], strict=True):
            for number, to, begins in changes[cut]:
                live[number][to] = live[number].get(to, 0) + (1 if begins else -1)
            if cut < after and cut != 0xD800:
                yield cut, after - 1, [{to for to, n in one.items() if n} for one in live]

    def iter_states(self) -> Iterator[DfaState]:
        """All places, nearest first."""
        seen, todo = {self.start}, deque([self.start])
        while todo:
            place = todo.popleft()
            yield place
            for _, to in self.transitions(place):
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
            if len(seen) > MAX_STATES:
                raise DfaTooComplex

    @property
    def is_empty(self) -> bool:
        """No text is of the set."""
        return not all(self.start[: self._wanted]) or not any(
            map(self.is_accepting, self.iter_states())
        )

    def to_regex(self) -> RegexExpr:
        """An expression that matches these texts. Of an empty set: regex.NOTHING."""
        return _StateElimination(self).to_regex()


@functools.lru_cache(maxsize=64)
def _build_nfa(node: RegexExpr) -> _Nfa:
    return _Nfa(node)


def fully_matches(node: RegexExpr, value: str) -> bool:
    """The text is matched as a whole. Takes time of its length, whatever the expression."""
    net = _build_nfa(node)
    states = net.start
    for char in value:
        point = ord(char)
        reached = {
            to
            for state in states
            for ranges, to in net.edges[state]
            if any(first <= point <= last for first, last in ranges)
        }
        states = net.epsilon_closure(sorted(reached))
        if not states:
            return False
    return net.end in states


def intersects(*nodes: RegexExpr) -> bool:
    """Whether some text matches all of the nodes."""
    return not RegexDfa(nodes).is_empty


def difference(all_of: Sequence[RegexExpr], none_of: Sequence[RegexExpr]) -> RegexExpr:
    """Texts that match all of the first and none of the second."""
    return RegexDfa(all_of, none_of).to_regex()


@functools.lru_cache(maxsize=1024)
def parse_search(pattern: str, wide: bool = False) -> RegexExpr:
    """As regex_ast.parse_search, with look-aheads at the start of an anchored pattern.

    Raises RequestError, and DfaTooComplex for large look-aheads.
    """
    node, all_of, none_of = split_lookaheads(pattern, wide)
    return difference([node, *all_of], none_of) if all_of or none_of else node


def split_lookaheads(
    pattern: str, wide: bool = False
) -> tuple[RegexExpr, list[RegexExpr], list[RegexExpr]]:
    """A pattern without the look-aheads that it begins with, what must match too, and what must
    not. Takes linear time. Raises RequestError."""
    rest = pattern.removeprefix("^")
    all_of: list[RegexExpr] = []
    none_of: list[RegexExpr] = []
    while rest.startswith(("(?!", "(?=")) and pattern.startswith("^") and (end := _group_end(rest)):
        ahead, is_barred = f"^(?:{rest[3:end]})", rest.startswith("(?!")
        (none_of if is_barred else all_of).append(regex_ast.parse_search(ahead, wide != is_barred))
        rest = rest[end + 1 :]
    is_choice = (
        isinstance(regex_ast.parse_regex(rest), RegexAlternation) if none_of or all_of else True
    )
    if is_choice:
        return regex_ast.parse_search(pattern, wide), [], []
    return regex_ast.parse_search(f"^{rest}", wide), all_of, none_of


def _group_end(pattern: str) -> int:
    """End of the group that a pattern begins with; 0: it begins with none."""
    depth, place, in_class = 0, 0, False
    for found in re.finditer(r"\\.|[\[\]()]", pattern, re.DOTALL):
        sign, place = found[0], found.start()
        if in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        else:
            depth += (sign == "(") - (sign == ")")
        if not depth:
            return place
    return 0


class _StateElimination:
    """States of an automaton taken out one by one, until one edge from start to end is left."""

    def __init__(self, texts: RegexDfa) -> None:
        places = list(texts.iter_states())
        number = {place: at for at, place in enumerate(places)}
        self.start, self.end = len(places), len(places) + 1
        self.out: list[dict[int, RegexExpr]] = [{} for _ in range(len(places) + 2)]
        self.into: list[set[int]] = [set() for _ in range(len(places) + 2)]
        self.add_edge(self.start, 0, regex_ast.EMPTY)
        for place, at in number.items():
            for ranges, to in texts.transitions(place):
                self.add_edge(at, number[to], CharClass(ranges))
            if texts.is_accepting(place):
                self.add_edge(at, self.end, regex_ast.EMPTY)
        self.parts = 0

    def add_edge(self, one: int, to: int, node: RegexExpr) -> None:
        known = self.out[one].get(to)
        self.out[one][to] = node if known is None else _alternation(known, node)
        self.into[to].add(one)

    def to_regex(self) -> RegexExpr:
        left = set(range(self.start))
        while left:
            state = min(left, key=self.weight)
            left.remove(state)
            self.eliminate(state)
        return self.out[self.start].get(self.end, regex_ast.NO_MATCH)

    def weight(self, state: int) -> int:
        return len(self.into[state]) * len(self.out[state])

    def eliminate(self, state: int) -> None:
        loop = self.out[state].pop(state, None)
        self.into[state].discard(state)
        again = [] if loop is None else [RegexRepeat(loop, 0, None)]
        for one in self.into[state]:
            before = self.out[one].pop(state)
            for to, after in self.out[state].items():
                self.add_edge(one, to, _sequence(before, *again, after))
                self.parts += count_pieces(self.out[one][to])
                if self.parts > 20 * MAX_PARTS or count_pieces(self.out[one][to]) > MAX_PARTS:
                    raise DfaTooComplex
        for to in self.out[state]:
            self.into[to].discard(state)
        self.out[state], self.into[state] = {}, set()


def count_pieces(node: RegexExpr) -> int:
    """Pieces of an expression, as it is written."""
    if isinstance(node, RegexSequence | RegexAlternation):
        return 1 + sum(map(count_pieces, node.parts))
    if isinstance(node, RegexRepeat):
        return 1 + count_pieces(node.part)
    return 1


def _alternation(one: RegexExpr, two: RegexExpr) -> RegexExpr:
    if isinstance(one, CharClass) and isinstance(two, CharClass):
        return CharClass(regex_ast.union_ranges(one.ranges, two.ranges))
    parts = [
        part
        for node in (one, two)
        for part in (node.parts if isinstance(node, RegexAlternation) else (node,))
    ]
    if regex_ast.EMPTY not in parts:
        return RegexAlternation(tuple(parts))
    rest = tuple(part for part in parts if part != regex_ast.EMPTY)
    return (
        RegexRepeat(rest[0] if len(rest) == 1 else RegexAlternation(rest), 0, 1)
        if rest
        else regex_ast.EMPTY
    )


def _sequence(*nodes: RegexExpr) -> RegexExpr:
    parts = [
        p for node in nodes for p in (node.parts if isinstance(node, RegexSequence) else (node,))
    ]
    return parts[0] if len(parts) == 1 else RegexSequence(tuple(parts))
