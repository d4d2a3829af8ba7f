"""Any text up to the first of several marks, as states: what each next character leads to.

    states = Scan([mark, ...])     mark: characters, and ids of special tokens
    states[0]                      the start; a state that ends a mark says which

As in every matcher of many words at once (Aho and Corasick), a state is a beginning of a mark, and
what does not go on with it falls back to the longest beginning that the text ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MarkerSymbols = tuple[str | int, ...]
"""Characters, one by one, and ids."""


@dataclass(slots=True)
class ScanState:
    """A place in the text: what of the marks it ends with."""

    next: dict[str | int, int] = field(default_factory=dict)
    """By characters; all others lead to state 0. An id only where a mark goes on with it."""
    matched_marker: int | None = None
    """The mark that is whole here."""
    within_token: bool = False
    """Behind a special token: the mark has begun for good, no other character may come."""


def marker_symbols(pieces: Sequence[str | int]) -> MarkerSymbols:
    """A text in pieces (Names.cut), character by character."""
    made: list[str | int] = []
    for piece in pieces:
        made += [piece] if isinstance(piece, int) else list(piece)
    return tuple(made)


def build_automaton(marks: Sequence[MarkerSymbols]) -> list[ScanState]:
    """The states. Of marks that begin alike the shorter is met; none is within another."""
    states, falls = _build_trie(marks)
    for at in _by_depth(states):
        state = states[at]
        for symbol, to in list(state.next.items()):
            back = falls[at]
            while back is not None and symbol not in states[back].next:
                back = falls[back]
            falls[to] = states[back].next[symbol] if back is not None else 0
    for at in _by_depth(states):
        fall = falls[at]
        if fall is not None and not states[at].within_token:
            states[at].next = {**states[fall].next, **states[at].next}
            if states[at].matched_marker is None:
                states[at].matched_marker = states[fall].matched_marker
    return states


def _build_trie(marks: Sequence[MarkerSymbols]) -> tuple[list[ScanState], list[int | None]]:
    states = [ScanState()]
    for number, mark in enumerate(marks):
        at, inside = 0, False
        for symbol in mark:
            inside = inside or isinstance(symbol, int)
            if symbol not in states[at].next:
                states.append(ScanState(within_token=inside))
                states[at].next[symbol] = len(states) - 1
            at = states[at].next[symbol]
        if states[at].matched_marker is None:
            states[at].matched_marker = number
    return states, [None] * len(states)


def _by_depth(states: Sequence[ScanState]) -> list[int]:
    order, seen = [0], {0}
    for at in order:
        for to in states[at].next.values():
            if to not in seen:
                seen.add(to)
                order.append(to)
    return order
