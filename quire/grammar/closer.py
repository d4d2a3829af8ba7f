"""What closing has to know of a form, and what the guides of one grammar share.

    plan(form, matcher, spelling) -> Least   slow, in the pool's worker; plain data
    closer_of(least, spelling) -> Closer     once for each grammar, in the engine's process

A way is tokens that lead to the end of a text. Not here: following one (quire.grammar.closing).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.grammar.base import Matcher, Words
from quire.grammar.forms import Form
from quire.grammar.jumps import Bounds, bounds
from quire.grammar.spelling import Spelling
from quire.grammar.ways import Ways

EFFORT = 4_000
"""Places that are looked at for the shortest text of a form, in each order of trying."""
EFFORT_MORE = 150
"""The same where a text was made from the form: it is nearly always the shortest."""
MOST_TAILS = 24
"""Ends of the shortest text that are tried before a way is looked for."""
MOST_VALUES = 64
VALUES = (b"true", b"false", b"null", b'""', b"[]", b"{}", b"-0", *b"0 1 2 3 4 5 6 7 8 9".split())
ORDERS = (b"", b"0", b'"', b"n", b"[", b"{")

Way = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Least:
    """What closing has to know of a form. Plain data, which goes over a pipe."""

    least: int | None = None
    """Fewest tokens that a whole text takes; None: nobody closes this form."""
    way: Way = ()
    """That text."""
    bounds: Bounds | None = None
    tails: tuple[Way, ...] = ()
    """Ends of that text, the shortest first: what most often closes any text."""


def plan(form: Form, matcher: Matcher, spelling: Spelling) -> Least:
    """Find the shortest text of the form. matcher: a fresh one of it. Slow."""
    known = bounds(form, spelling)
    if known is None:
        return Least()
    seeker = Ways(known, spelling)
    made = None if known.text is None else seeker.spelt(known.text)
    texts: list[Way] = []
    if made is not None and leads(matcher, made, spelling.ends[0]):
        texts.append(made)
    for first in ORDERS[: 1 if texts else None]:
        found = seeker.find_shortest(matcher, EFFORT_MORE if texts else EFFORT, first)
        if found is not None:
            texts.append(tuple(found))
    if not texts:
        return Least()
    shortest = min(texts, key=len)
    return Least(len(shortest), shortest, known, tuple(_tails(shortest, spelling)))


def _tails(way: Way, spelling: Spelling) -> Iterator[Way]:
    if spelling.special & {*way}:
        return
    text = b"".join(spelling.pieces[one] for one in way)
    for at in range(len(text) - 1, max(len(text) - MOST_TAILS, 0) - 1, -1):
        found = spelling.fewest(text[at:])
        if found is not None:
            yield found


def closer_of(least: Least, spelling: Spelling) -> Closer | None:
    """What guides of that form share. None: it is not closed."""
    if least.bounds is None:
        return None
    return Closer(least.way, least.bounds, spelling, least.tails)


class Closer:
    """What the guides of one grammar share. Never changed."""

    def __init__(
        self, way: Way, known: Bounds, spelling: Spelling, tails: tuple[Way, ...] = ()
    ) -> None:
        self.way, self.tails = way, tails
        self.bounds = known
        self.spelling = spelling
        self.ways = Ways(known, spelling)
        self.end = spelling.ends[0]
        self.quote = spelling.ids.get(b'"')
        self.quote_words = spelling.words([] if self.quote is None else [self.quote])
        self.garbage_words = spelling.words(self.ways.garbage)
        values = [one.encode() for one in known.literals[:MOST_VALUES]]
        self.values = (*values, *VALUES)
        self.base = 0 if known.plain else known.jump
        self._weights = spelling.weights
        self._growths = [self.base + known.jump * weight for weight in range(256)]
        self.light_jump = self.base + known.jump + known.slack
        self.heavy_jump = self.base + known.jump * max(spelling.heaviest, 1) + known.slack
        beyond = spelling.words(_beyond(known.marks, spelling))
        self.text = spelling.text & ~beyond
        self.within = spelling.within & ~beyond
        self.quoted = spelling.quoted & ~spelling.words(_named(known.names, spelling))

    def after(self, way: Way, token: int) -> Way | None:
        """What is left of a way behind a token that writes its beginning, but for white space.
        None: it does not."""
        spelling = self.spelling
        if token in spelling.special:
            return way[1:] if way[:1] == (token,) else None
        text, place = b"", 0
        while place < len(way) and way[place] not in spelling.special:
            text += spelling.pieces[way[place]]
            place += 1
        piece = spelling.pieces[token]
        if not text.startswith(piece):
            piece = b"".join(piece.split())
            if not piece or not text.startswith(piece):
                return None
        rest = spelling.fewest(text[len(piece) :])
        return None if rest is None else rest + way[place:]

    def instead(self, way: Way, token: int) -> Way | None:
        """What is left of a way that begins with a value of the form's, behind a token that begins
        another value. None: nothing is known."""
        spelling = self.spelling
        text = self.text_of(way)
        begun = next((one for one in self.values if text.startswith(one)), None)
        if begun is None or token in spelling.special:
            return None
        piece = spelling.pieces[token]
        other = next((one for one in self.values if one.startswith(piece) and one != begun), None)
        if other is None:
            return None
        return spelling.fewest(other[len(piece) :] + text[len(begun) :])

    def text_of(self, way: Way) -> bytes:
        """What a way writes, up to a special token."""
        pieces, special = self.spelling.pieces, self.spelling.special
        return b"".join(pieces[one] for one in itertools.takewhile(lambda t: t not in special, way))

    def words_of(self, token: int) -> Words:
        """A mask of one token."""
        words = np.zeros_like(self.quote_words)
        words.view(np.uint32)[token >> 5] = 1 << (token & 31)
        return words

    def stays(self, token: int) -> bool:
        """Within a string it goes on within it."""
        return bool(self.within[token >> 5] >> (token & 31) & 1)

    def growth(self, token: int) -> int:
        """How much farther off the end may be behind this token, but for the slack."""
        return self._growths[self._weights[token]]


def _beyond(marks: Sequence[str], spelling: Spelling) -> list[int]:
    """Tokens that may end a mark that stands before them in part, or that hold one."""
    found: list[int] = []
    for mark in marks:
        data = mark.encode()
        found += spelling.holding(data)
        for at in range(1, len(data)):
            found += spelling.beginning(data[at:])
    return found


def _named(names: Sequence[str], spelling: Spelling) -> list[int]:
    """Tokens that may end a name with its quote: then it is that name. The quote alone does."""
    texts = {b'"'}
    for name in names:
        data = name.encode()
        texts.update(data[at:] + b'"' for at in range(len(data)))
    return [spelling.ids[text] for text in texts if text in spelling.ids]


def leads(matcher: Matcher, tokens: Sequence[int], end: int) -> bool:
    """The tokens lead from here to an end. Whether they can be taken at all is quickly seen."""
    count = len(tokens)
    return matcher.validate(tokens) == count and matcher.validate((*tokens, end)) > count
