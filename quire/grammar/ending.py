"""What all backends' matchers share: where a text may end, and what an end token does.

A backend's own matcher (Raw) knows the form; end tokens, of which a model may have several and of
which a form may name some, are counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from quire.errors import RequestError
from quire.grammar.base import Words
from quire.grammar.vocabulary import Vocabulary


class Raw(Protocol):
    """A backend's matcher, without an idea of the end."""

    fault: str | None
    stops: frozenset[int]
    """End tokens that the form does not name."""

    def take(self, token: int) -> bool:
        """Take a token that the form allows here. False: nothing changed."""
        ...

    def back(self, tokens: int) -> None: ...

    def mask(self, words: Words) -> None:
        """Bits of what the form allows here. An end token that the form does not name may stand
        there too, but only where the text is whole."""
        ...

    def ahead(self, tokens: Sequence[int]) -> int:
        """How many of them could be taken, up to and with the first of `stops`, which counts
        where the text is whole by then. Nothing changes."""
        ...

    def whole(self) -> bool: ...

    def stopped(self) -> bool:
        """Nothing that the form allows can follow."""
        ...

    def twin(self) -> Raw: ...


class Ends:
    """The end tokens of a vocabulary, as bits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = frozenset(vocabulary.ends)
        only = np.zeros(vocabulary.words, np.uint32)
        for i in vocabulary.ends:
            only[i // 32] |= np.uint32(1 << (i % 32))
        self.only: Words = only.view(np.int32)
        """The mask that allows nothing else."""
        self.where = np.flatnonzero(self.only)
        self.bits: Words = self.only[self.where]


class EndingMatcher:
    """A base.Matcher over a backend's own."""

    __slots__ = ("ended", "ends", "raw")

    def __init__(self, raw: Raw, ends: Ends, ended: int = 0) -> None:
        self.raw = raw
        self.ends = ends
        self.ended = ended
        """End tokens that were accepted."""

    def accept(self, token: int) -> bool:
        if not self.ended and self.raw.take(token):
            return True
        if token in self.ends.ids and (self.ended or self.complete):
            self.ended += 1
            return True
        return False

    def rollback(self, tokens: int) -> None:
        of_ends = min(self.ended, tokens)
        self.ended -= of_ends
        if tokens > of_ends:
            self.raw.back(tokens - of_ends)

    def validate(self, tokens: Sequence[int]) -> int:
        taken = 0 if self.ended else self.raw.ahead(tokens)
        if taken == len(tokens):
            return taken
        is_over = bool(self.ended) or (taken > 0 and tokens[taken - 1] in self.raw.stops)
        if not is_over:
            next_one = tokens[taken]
            if next_one in self.raw.stops or next_one not in self.ends.ids:
                return taken
            if not self._complete_behind(tokens[:taken]):  # an end that the form names elsewhere
                return taken
        rest = tokens[taken:]
        return taken + next((n for n, t in enumerate(rest) if t not in self.ends.ids), len(rest))

    def _complete_behind(self, tokens: Sequence[int]) -> bool:
        if self.ended or not tokens:
            return bool(self.ended) or self.complete
        for token in tokens:
            assert self.raw.take(token)
        try:
            return self.complete
        finally:
            self.raw.back(len(tokens))

    def fill(self, words: Words) -> None:
        if self.ended or self.raw.fault is not None:
            words[:] = self.ends.only
            return
        self.raw.mask(words)
        self.finish(words)

    def finish(self, words: Words) -> None:
        """Set the end tokens' bits in what the form allows."""
        if self.raw.fault is not None:
            words[:] = self.ends.only
        elif self.raw.whole():
            words[self.ends.where] |= self.ends.bits

    @property
    def complete(self) -> bool:
        return self.raw.fault is None and (self.ended > 0 or self.raw.whole())

    @property
    def over(self) -> bool:
        return self.ended > 0 or self.raw.fault is not None or self.raw.stopped()

    @property
    def fault(self) -> str | None:
        return self.raw.fault

    def copy(self) -> EndingMatcher:
        return EndingMatcher(self.raw.twin(), self.ends, self.ended)


def stops(vocabulary: Vocabulary, named: Collection[int]) -> tuple[frozenset[int], int | None]:
    """(what a backend may take for the end, what of it is none).

    End tokens that a form names are ordinary ones to its backend. Where it names all of them the
    backend, which must have one, gets another special token that no form comes to.
    """
    ends = frozenset(vocabulary.ends) - set(named)
    if ends:
        return ends, None
    for i, _ in vocabulary.special:
        if i not in vocabulary.ends and i not in named:
            return frozenset({i}), i
    raise RequestError("the form names every special token of the model; it must leave one")


def clear(words: Words, token: int | None) -> None:
    """Take a token out of a mask."""
    if token is not None:
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
