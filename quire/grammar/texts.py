"""Sets of texts that regular expressions describe: do two meet, what is left without a third.

A Texts is a deterministic automaton that is made as it is walked: each state is a tuple of sets of
states, one set for each expression. Bounded: what grows too large raises TooComplex, which says
nothing about the caller's schema being wrong, only that it cannot be decided here.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence

from quire.grammar import regex
from quire.grammar.regex import Alt, Chars, Node, Ranges, Repeat, Seq

MOST_POSITIONS = 3_000
"""Characters of an expression, counts written out."""
MOST_STATES = 600
MOST_EDGES = 20_000
MOST_PARTS = 3_000
"""Pieces of an expression that is made from an automaton."""

Place = tuple[frozenset[int], ...]


class TooComplex(Exception):
    """Not decided: it would take too long."""


class _Net:
    """One expression as a non-deterministic automaton; 0 is where it starts."""

    def __init__(self, node: Node) -> None:
        if regex.positions(node) > MOST_POSITIONS:
            raise TooComplex
        self.free: list[list[int]] = [[]]
        self.edges: list[list[tuple[Ranges, int]]] = [[]]
        self.end = self.add(node, 0)
        self.start = self.closed([0])

    def state(self) -> int:
        if len(self.free) > 8 * MOST_POSITIONS:
            raise TooComplex
        self.free.append([])
        self.edges.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """The state in which the node, begun in `start`, is over."""
        if isinstance(node, Chars):
            end = self.state()
            self.edges[start].append((node.ranges, end))
            return end
        if isinstance(node, Seq):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Alt):
            end = self.state()
            for part in node.parts:
                self.free[self.add(part, start)].append(end)
            return end
        assert isinstance(node, Repeat), f"{node!r} has no automaton"
        return self.repeated(node, start)

    def repeated(self, node: Repeat, start: int) -> int:
        for _ in range(node.least):
            start = self.add(node.part, start)
        if node.most is None:
            again = self.state()
            self.free[start].append(again)
            self.free[self.add(node.part, again)].append(again)
            return again
        end = self.state()
        for _ in range(node.most - node.least):
            self.free[start].append(end)
            start = self.add(node.part, start)
        self.free[start].append(end)
        return end

    def closed(self, states: Sequence[int]) -> frozenset[int]:
        found = set(states)
        todo = list(states)
        while todo:
            for one in self.free[todo.pop()]:
                if one not in found:
                    found.add(one)
                    todo.append(one)
        return frozenset(found)


class Texts:
    """Texts that match all of `all_of` and none of `none_of`: nodes without anchors."""

    def __init__(self, all_of: Sequence[Node], none_of: Sequence[Node] = ()) -> None:
        self._nets = [_net(node) for node in (*all_of, *none_of)]
        self._wanted = len(all_of)
        self.start: Place = tuple(net.start for net in self._nets)
        self._next: dict[Place, list[tuple[Ranges, Place]]] = {}
        self._edges = 0

    def ends(self, place: Place) -> bool:
        """A text that leads here is of the set."""
        over = [net.end in states for net, states in zip(self._nets, place, strict=True)]
        return all(over[: self._wanted]) and not any(over[self._wanted :])

    def steps(self, place: Place) -> list[tuple[Ranges, Place]]:
        """Which characters lead where. Those that lead nowhere are left out."""
        known = self._next.get(place)
        if known is None:
            known = self._next[place] = list(self._made(place))
            self._edges += len(known)
            if self._edges > MOST_EDGES:
                raise TooComplex
        return known

    def _made(self, place: Place) -> Iterator[tuple[Ranges, Place]]:
        found: dict[Place, list[tuple[int, int]]] = {}
        for first, last, reached in self._pieces(place):
            to = tuple(
                net.closed(sorted(states)) if states else frozenset()
                for net, states in zip(self._nets, reached, strict=True)
            )
            if all(to[: self._wanted]):
                found.setdefault(to, []).append((first, last))
        for to, pieces in found.items():
            yield regex.union(tuple(pieces)), to

    def _pieces(self, place: Place) -> Iterator[tuple[int, int, list[set[int]]]]:
        """The alphabet, cut where an edge begins or ends."""
        changes: dict[int, list[tuple[int, int, bool]]] = {0: [], 0xD800: [], 0xE000: []}
        for number, (net, states) in enumerate(zip(self._nets, place, strict=True)):
            for ranges, to in (edge for state in states for edge in net.edges[state]):
                for first, last in ranges:
                    changes.setdefault(first, []).append((number, to, True))
                    changes.setdefault(last + 1, []).append((number, to, False))
        live: list[dict[int, int]] = [{} for _ in self._nets]
        cuts = sorted(changes)
        for cut, after in zip(cuts, [*cuts[1:], regex.TOP + 1], strict=True):
            for number, to, begins in changes[cut]:
                live[number][to] = live[number].get(to, 0) + (1 if begins else -1)
            if cut < after and cut != 0xD800:
                yield cut, after - 1, [{to for to, n in one.items() if n} for one in live]

    def walk(self) -> Iterator[Place]:
        """All places, nearest first."""
        seen, todo = {self.start}, deque([self.start])
        while todo:
            place = todo.popleft()
            yield place
            for _, to in self.steps(place):
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
            if len(seen) > MOST_STATES:
                raise TooComplex

    @property
    def empty(self) -> bool:
        """No text is of the set."""
        return not all(self.start[: self._wanted]) or not any(map(self.ends, self.walk()))

    def node(self) -> Node:
        """An expression that matches these texts. Of an empty set: regex.NOTHING."""
        return _Elimination(self).node()


@functools.lru_cache(maxsize=64)
def _net(node: Node) -> _Net:
    return _Net(node)


def matches(node: Node, value: str) -> bool:
    """The text is matched as a whole. Takes time of its length, whatever the expression."""
    net = _net(node)
    states = net.start
    for char in value:
        point = ord(char)
        reached = {
            to
            for state in states
            for ranges, to in net.edges[state]
            if any(first <= point <= last for first, last in ranges)
        }
        states = net.closed(sorted(reached))
        if not states:
            return False
    return net.end in states


def meet(*nodes: Node) -> bool:
    """Some text matches all of the nodes."""
    return not Texts(nodes).empty


def without(all_of: Sequence[Node], none_of: Sequence[Node]) -> Node:
    """Texts that match all of the first and none of the second."""
    return Texts(all_of, none_of).node()


class _Elimination:
    """States of an automaton taken out one by one, until one edge from start to end is left."""

    def __init__(self, texts: Texts) -> None:
        places = list(texts.walk())
        number = {place: at for at, place in enumerate(places)}
        self.start, self.end = len(places), len(places) + 1
        self.out: list[dict[int, Node]] = [{} for _ in range(len(places) + 2)]
        self.into: list[set[int]] = [set() for _ in range(len(places) + 2)]
        self.link(self.start, 0, regex.EMPTY)
        for place, at in number.items():
            for ranges, to in texts.steps(place):
                self.link(at, number[to], Chars(ranges))
            if texts.ends(place):
                self.link(at, self.end, regex.EMPTY)
        self.parts = 0

    def link(self, one: int, to: int, node: Node) -> None:
        known = self.out[one].get(to)
        self.out[one][to] = node if known is None else _either(known, node)
        self.into[to].add(one)

    def node(self) -> Node:
        left = set(range(self.start))
        while left:
            state = min(left, key=self.weight)
            left.remove(state)
            self.take_out(state)
        return self.out[self.start].get(self.end, regex.NOTHING)

    def weight(self, state: int) -> int:
        return len(self.into[state]) * len(self.out[state])

    def take_out(self, state: int) -> None:
        loop = self.out[state].pop(state, None)
        self.into[state].discard(state)
        again = [] if loop is None else [Repeat(loop, 0, None)]
        for one in self.into[state]:
            before = self.out[one].pop(state)
            for to, after in self.out[state].items():
                self.link(one, to, _joined(before, *again, after))
                self.parts += size(self.out[one][to])
                if self.parts > 20 * MOST_PARTS or size(self.out[one][to]) > MOST_PARTS:
                    raise TooComplex
        for to in self.out[state]:
            self.into[to].discard(state)
        self.out[state], self.into[state] = {}, set()


def size(node: Node) -> int:
    """Pieces of an expression, as it is written."""
    if isinstance(node, Seq | Alt):
        return 1 + sum(map(size, node.parts))
    if isinstance(node, Repeat):
        return 1 + size(node.part)
    return 1


def _either(one: Node, two: Node) -> Node:
    if isinstance(one, Chars) and isinstance(two, Chars):
        return Chars(regex.union(one.ranges, two.ranges))
    parts = [
        part for node in (one, two) for part in (node.parts if isinstance(node, Alt) else (node,))
    ]
    if regex.EMPTY not in parts:
        return Alt(tuple(parts))
    rest = tuple(part for part in parts if part != regex.EMPTY)
    return Repeat(rest[0] if len(rest) == 1 else Alt(rest), 0, 1) if rest else regex.EMPTY


def _joined(*nodes: Node) -> Node:
    parts = [p for node in nodes for p in (node.parts if isinstance(node, Seq) else (node,))]
    return parts[0] if len(parts) == 1 else Seq(tuple(parts))
