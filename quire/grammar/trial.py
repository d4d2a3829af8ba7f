"""One mask near the budget: which tokens may come, after which the text can still be closed.

Tokens are tried on the matcher: alone, or for all tokens of a class by one that is as bad as any of
them. The way that is known is always one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.grammar.base import Matcher, Words
from quire.grammar.closer import Closer, Way, leads

EFFORT_EACH = 60
"""Places that are looked at for a way to the end behind one token that is tried."""
EFFORT_ALL = 100
"""The same for all tokens that are tried before a step."""
MOST_TRIED = 12
"""Tokens that are tried before a step."""
MOST_LISTED = 2000
"""Where more short tokens may come, they are pieces of a text that the form says much of."""
MOST_FOUND = 24
"""Where the end may come farther off than this, looking for it with such effort is in vain."""
ROOM = 8
"""Tokens by which a way that is known from elsewhere must be shorter than it has to be: where there
is less room, the shortest is looked for, if it could be much shorter."""
SHORT_WAY = 4
MOST_WAYS = 6
LIKELY = b',"{[}]:tfn-.0123456789'


class Trial:
    """What was tried for one mask, and what came of it."""

    def __init__(
        self,
        matcher: Matcher,
        closer: Closer,
        words: Words,
        left: int,
        way: Way,
        known: dict[int, tuple[Way, ...]],
        tail: bytes,
    ) -> None:
        """words: the matcher's mask, which run() narrows. way: one that leads from here.

        known: ways that led on from a token before; more are added. tail: the end of the text.
        """
        self.matcher = matcher
        self.closer = closer
        self.words = words
        self.rest = left - 1
        self.way, self.known, self.tail = way, known, tail
        self.tried: dict[int, Way] = {}
        """A way for each token that was tried alone and may come."""
        self.string: int | None = None
        """Within a string where anything may stand: tokens that follow a quote with text before it,
        at most."""
        self.allowed = words & closer.spelling.end_words
        self.spare: list[Way] = []
        """Ways from behind the end of a string."""
        self.effort = EFFORT_ALL
        self.barred = False
        """Anything could have stood here, but for the budget."""

    def run(self) -> None:
        way = self.way
        if way:
            self._allow(way[0], way[1:])
        if self.rest >= max(len(way), 1):
            mask = self.closer.ways.here(self.matcher)
            anywhere = self.closer.ways.free(mask)
            if anywhere:
                self._classes(self.closer.ways.wide(mask))
            self._each(anywhere)
        self.words[:] = self.allowed

    def _allow(self, token: int, way: Way) -> None:
        self.allowed[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))
        self.tried[token] = way

    def _behind(self, tokens: Sequence[int]) -> Way | None:
        """A way to the end from behind these tokens, if there is one that can be afforded."""
        way = self.way
        if self._leads(tokens, way):
            return way
        for begun in (way, way[1:]):  # a number's end may stand before its next digit
            same = self.closer.after(begun, tokens[-1]) if begun else None
            if same is not None and self._leads(tokens, same):
                return same if len(same) <= self.rest else None
        if way and self._leads(tokens, way[1:]):
            return way[1:]
        if len(tokens) == 1:
            other = self.closer.instead(way, tokens[0])
            if other is not None and self._leads(tokens, other):
                return other if len(other) <= self.rest else None
            for known in self.known.get(tokens[0], ()):
                if len(known) <= max(self.rest - ROOM, SHORT_WAY) and self._leads(tokens, known):
                    return known if len(known) <= self.rest else None
        for end in self.closer.tails:
            if self._leads(tokens, end):
                return end if len(end) <= self.rest else None
        if self.effort <= 0 or self.closer.growth(tokens[0]) > MOST_FOUND:
            return None
        for place, token in enumerate(tokens):
            if not self.matcher.accept(token):
                self.matcher.rollback(place)
                return None
        pieces = self.closer.spelling.pieces
        tail = self.tail + b"".join(pieces[token] for token in tokens)
        found = self.closer.ways.find(self.matcher, EFFORT_EACH, tail=tail)
        self.matcher.rollback(len(tokens))
        self.effort -= EFFORT_EACH if found is None else len(found)
        if found is None:
            return None
        if len(tokens) == 1:
            others = [one for one in self.known.get(tokens[0], ()) if one != tuple(found)]
            self.known[tokens[0]] = (tuple(found), *others[: MOST_WAYS - 1])
        return tuple(found) if len(found) <= self.rest else None

    def _leads(self, tokens: Sequence[int], way: Way) -> bool:
        return leads(self.matcher, (*tokens, *way), self.closer.end)

    def _classes(self, wide: bool) -> None:
        """Where anything may stand: what keeps within it, and what ends a string with its quote."""
        closer = self.closer
        slack = closer.bounds.mark if wide else closer.bounds.within
        if self._all_afford([(one,) for one in closer.ways.garbage], slack):
            self.allowed |= self.words & (closer.text if wide else closer.within)
        else:
            self.barred = True
        if not wide and closer.quote is not None:
            ends = [(one, closer.quote) for one in closer.ways.garbage]
            before = len(self.spare)
            if self._all_afford(ends, 0):
                self.allowed |= self.words & closer.quoted
                self.string = max(map(len, self.spare[before:]))

    def _all_afford(self, trials: Sequence[tuple[int, ...]], slack: int) -> bool:
        ways = [self._behind(one) for one in trials]
        known = [one for one in ways if one is not None]
        self.spare += known
        return len(known) == len(ways) and max(map(len, known)) + slack <= self.rest

    def _each(self, anywhere: bool) -> None:
        """Single tokens, the likeliest first."""
        spelling = self.closer.spelling
        if anywhere:
            others = self.words & ~self.allowed & self.closer.quote_words
        else:
            others = self.words & ~self.allowed
            if count(others) > MOST_TRIED:
                others &= spelling.short
        tokens = spelling.tokens(others) if count(others) <= MOST_LISTED else []
        for token in sorted(tokens, key=lambda one: _likely(spelling.pieces[one]))[:MOST_TRIED]:
            way = self._behind((token,))
            if way is not None and len(way) <= self.rest:
                self._allow(token, way)


def _likely(piece: bytes) -> int:
    """Which tokens are tried first, where there are many: what structures, then values."""
    if not piece:
        return 512
    place = LIKELY.find(piece[:1])
    return place if place >= 0 else len(LIKELY) + piece[0]


def count(words: Words) -> int:
    """Bits that are set."""
    return int.from_bytes(words.tobytes(), "little").bit_count()
