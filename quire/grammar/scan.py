"""Any text up to the first of several marks, as states: what each next character leads to.

    states = Scan([mark, ...])     mark: characters, and ids of special tokens
    states[0]                      the start; a state that ends a mark says which

As in every matcher of many words at once (Aho and Corasick), a state is a beginning of a mark, and
what does not go on with it falls back to the longest beginning that the text ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Mark = tuple[str | int, ...]
"""Characters, one by one, and ids."""


@dataclass(slots=True)
class State:
    """A place in the text: what of the marks it ends with."""

    next: dict[str | int, int] = field(default_factory=dict)
    """By characters; all others lead to state 0. An id only where a mark goes on with it."""
    ends: int | None = None
    """The mark that is whole here."""
    inside: bool = False
    """Behind a special token: the mark has begun for good, no other character may come."""


def mark_of(pieces: Sequence[str | int]) -> Mark:
    """A text in pieces (Names.cut), character by character."""
    made: list[str | int] = []
    for piece in pieces:
        made += [piece] if isinstance(piece, int) else list(piece)
    return tuple(made)


def scan(marks: Sequence[Mark]) -> list[State]:
    """The states. Of marks that begin alike the shorter is met; none is within another."""
    states, falls = _tree(marks)
    for at in _by_depth(states):
        state = states[at]
        for symbol, to in list(state.next.items()):
            back = falls[at]
            while back is not None and symbol not in states[back].next:
                back = falls[back]
            falls[to] = states[back].next[symbol] if back is not None else 0
    for at in _by_depth(states):
        fall = falls[at]
        if fall is not None and not states[at].inside:
            states[at].next = {**states[fall].next, **states[at].next}
            if states[at].ends is None:
                states[at].ends = states[fall].ends
    return states


def _tree(marks: Sequence[Mark]) -> tuple[list[State], list[int | None]]:
    states = [State()]
    for number, mark in enumerate(marks):
        at, inside = 0, False
        for symbol in mark:
            inside = inside or isinstance(symbol, int)
            if symbol not in states[at].next:
                states.append(State(inside=inside))
                states[at].next[symbol] = len(states) - 1
            at = states[at].next[symbol]
        if states[at].ends is None:
            states[at].ends = number
    return states, [None] * len(states)


def _by_depth(states: Sequence[State]) -> list[int]:
    order, seen = [0], {0}
    for at in order:
        for to in states[at].next.values():
            if to not in seen:
                seen.add(to)
                order.append(to)
    return order
