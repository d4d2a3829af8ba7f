"""Length-aware closing: constrained text is whole at any budget from an announced least upwards.

    plan(form, matcher, spelling) -> Least   slow, in the pool's worker; plain data
    closer(least, spelling) -> Closer        once for each grammar, in the engine's process
    Guide(matcher, closer)                 one for each sequence, in place of its matcher

A token that was drawn cannot be taken back, so the mask before must leave only tokens after which
the text can still be closed in what is left. `left` counts the tokens that may still be drawn, the
one that the mask is for included; the end token is not counted.

Far from its budget a text is free, and all that is done is a sum: how far the end can be at most
(quire.grammar.jumps). Where that does not fit, a way to the end is looked for on the matcher
(quire.grammar.ways). Where the way is so long that a single token might make it too long, only
tokens stay allowed that were tried: alone, or for all tokens of a class by one that is as bad as
any of them. The way itself is always one of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.errors import RequestError
from quire.grammar.base import Matcher, Words
from quire.grammar.forms import Form
from quire.grammar.jumps import Bounds, bounds
from quire.grammar.spelling import Spelling
from quire.grammar.ways import Ways

EFFORT = 20_000
"""Questions to the matcher for the shortest text of a form, in each order of trying."""
EFFORT_NOW = 1500
"""The same between two steps."""
EFFORT_EACH = 250
"""The same for one token that is tried."""
MOST_TRIED = 12
"""Tokens that are tried before a step."""
ROOM = 8
"""Tokens by which a way that is known from elsewhere must be shorter than it has to be: where there
is less room, the shortest is looked for."""
MOST_WAYS = 6
MOST_KNOWN = 64
LIKELY = b',"{[}]:tfn-.0123456789'
ORDERS = (b"", b"0", b'"', b"n", b"[", b"{")

Way = tuple[int, ...]
FillAll = Callable[[Sequence[tuple[int, Matcher]], Words], None]


@dataclass(frozen=True, slots=True)
class Least:
    """What closing has to know of a form. Plain data, which goes over a pipe."""

    least: int | None = None
    """Fewest tokens that a whole text takes; None: nobody closes this form."""
    way: Way = ()
    """That text."""
    bounds: Bounds | None = None


def plan(form: Form, matcher: Matcher, spelling: Spelling) -> Least:
    """Find the shortest text of the form. matcher: a fresh one of it. Slow.

    Raises RequestError where there is no text, or none that could be found.
    """
    known = bounds(form, spelling)
    if known is None:
        return Least()
    seeker = Ways(known, spelling)
    found = [seeker.find(matcher, EFFORT if not one else EFFORT // 4, one) for one in ORDERS]
    texts = [tuple(one) for one in found if one is not None]
    if not texts:
        raise RequestError("no text was found that the structured output asked for allows")
    shortest = min(texts, key=len)
    return Least(len(shortest), shortest, known)


def closer(least: Least, spelling: Spelling) -> Closer | None:
    """What guides of that form share. None: it is not closed."""
    return None if least.bounds is None else Closer(least.way, least.bounds, spelling)


class Closer:
    """What the guides of one grammar share. Only what it remembers of ways ever changes."""

    def __init__(self, way: Way, known: Bounds, spelling: Spelling) -> None:
        self.way = way
        self.bounds = known
        self.spelling = spelling
        self.ways = Ways(known, spelling)
        self.end = spelling.ends[0]
        self.quote = spelling.ids.get(b'"')
        self._known: dict[int, tuple[Way, ...]] = {}
        self.base = 0 if known.plain else known.jump
        self.light_jump = self.base + known.jump + known.slack
        self.heavy_jump = self.base + known.jump * max(spelling.heaviest, 1) + known.slack
        beyond = spelling.words(_beyond(known.marks, spelling))
        self.text = spelling.text & ~beyond
        self.within = spelling.within & ~beyond
        self.quoted = spelling.quoted & ~spelling.words(_named(known.names, spelling))

    def after(self, way: Way, token: int) -> Way | None:
        """What is left of a way behind a token that writes its beginning. None: it does not."""
        spelling = self.spelling
        if token in spelling.special:
            return way[1:] if way[:1] == (token,) else None
        text, place = b"", 0
        while place < len(way) and way[place] not in spelling.special:
            text += spelling.pieces[way[place]]
            place += 1
        if not text.startswith(spelling.pieces[token]):
            return None
        rest = spelling.fewest(text[len(spelling.pieces[token]) :])
        return None if rest is None else rest + way[place:]

    def known(self, token: int) -> tuple[Way, ...]:
        """Ways that led on from this token elsewhere, the latest first."""
        return self._known.get(token, ())

    def learn(self, token: int, way: Way) -> None:
        """Keep a way that was found. From several threads at once one may be lost."""
        if len(self._known) > MOST_KNOWN:
            self._known = {}
        others = [one for one in self._known.get(token, ()) if one != way]
        self._known[token] = (way, *others[: MOST_WAYS - 1])

    def growth(self, token: int) -> int:
        """How much farther off the end may be behind this token, but for the slack."""
        return self.base + self.bounds.jump * self.spelling.weights[token]


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


def _likely(piece: bytes) -> int:
    """Which tokens are tried first, where there are many: what structures, then values."""
    if not piece:
        return 512
    place = LIKELY.find(piece[:1])
    return place if place >= 0 else len(LIKELY) + piece[0]


class Guide:
    """A matcher with a budget. Without a closer it lets everything through."""

    def __init__(self, matcher: Matcher, closer: Closer | None = None) -> None:
        self.matcher = matcher
        self._closer = closer
        self._way: Way = closer.way if closer else ()
        self._sure = True
        """The way leads from here to the end; otherwise it did from some tokens ago."""
        self._bound = len(self._way)
        """The end is no farther off than this, but for the slack."""
        self._forced = False
        self._tried: dict[int, Way] = {}
        self._spare: tuple[Way, ...] = ()
        self._past: list[tuple[Way, bool, int, bool, tuple[Way, ...]]] = []

    def fill(self, words: Words, left: int | None = None) -> None:
        """Write the mask of the next token. left: tokens that may be drawn, this one included."""
        self.matcher.fill(words)
        self.narrow(words, left)

    def narrow(self, words: Words, left: int | None) -> None:
        """Take out of the matcher's own mask what the budget does not allow."""
        closer = self._closer
        self._tried = {}
        if closer is None or left is None or self.matcher.over or self._fits(words, left):
            return
        if not self._sure:
            self._find(left)
            if self._fits(words, left):
                return
        _Trial(self, closer, words, left).run()

    def _fits(self, words: Words, left: int) -> bool:
        """No token, or none that opens one thing at most, can lead too far away: done then."""
        closer = self._closer
        assert closer is not None
        spare = left - 1 - self._bound
        if spare >= closer.heavy_jump:
            return True
        if spare < closer.light_jump:
            return False
        light = words & closer.spelling.light
        if not light.any():
            return False
        words[:] = light
        return True

    def _find(self, left: int) -> None:
        """Make the way one that leads from here."""
        closer, matcher = self._closer, self.matcher
        assert closer is not None
        if matcher.complete:
            self._take(())
            return
        for way in (self._way, *self._spare):
            if way and len(way) <= left and self._leads(way):
                self._take(way)
                return
        best: Way | None = None
        for first in ORDERS:
            found = closer.ways.find(matcher, EFFORT_NOW, first)
            if found is not None and (best is None or len(found) < len(best)):
                best = tuple(found)
            if best is not None and len(best) <= left:
                break
        if best is not None:
            self._take(best)

    def _leads(self, way: Way) -> bool:
        closer = self._closer
        assert closer is not None
        return self.matcher.validate((*way, closer.end)) > len(way)

    def _take(self, way: Way) -> None:
        self._way, self._sure, self._bound, self._spare = way, True, len(way), ()

    def accept(self, token: int) -> bool:
        """Take the next token. False, and nothing changed: not allowed."""
        if not self.matcher.accept(token):
            return False
        closer = self._closer
        if closer is None:
            return True
        self._past.append((self._way, self._sure, self._bound, self._forced, self._spare))
        way = self._tried.get(token)
        if way is None and self._sure and self._way[:1] == (token,):
            way = self._way[1:]
        self._tried = {}
        if way is not None:
            self._take(way)
        else:
            self._sure = False
            self._bound += closer.growth(token)
        return True

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens."""
        self.matcher.rollback(tokens)
        if self._closer is None or not tokens:
            return
        self._way, self._sure, self._bound, self._forced, self._spare = self._past[-tokens]
        del self._past[-tokens:]
        self._tried = {}

    def copy(self) -> Guide:
        """Another one in the same state."""
        other = Guide(self.matcher.copy(), self._closer)
        other._way, other._sure, other._bound = self._way, self._sure, self._bound
        other._forced, other._tried, other._spare = self._forced, dict(self._tried), self._spare
        other._past = list(self._past)
        return other

    @property
    def complete(self) -> bool:
        """The text so far is whole."""
        return self.matcher.complete

    @property
    def over(self) -> bool:
        """Only the end can follow, or has."""
        return self.matcher.over

    @property
    def forced(self) -> bool:
        """The budget, not the model, chose the end."""
        return self._forced


class _Trial:
    """One mask near the budget: what was tried, and the way."""

    def __init__(self, guide: Guide, closer: Closer, words: Words, left: int) -> None:
        self.guide = guide
        self.matcher = guide.matcher
        self.closer = closer
        self.words = words
        self.rest = left - 1
        self.allowed = words & closer.spelling.end_words
        self.spare: list[Way] = []

    def run(self) -> None:
        way = self.guide._way
        if way:
            self._allow(way[0], way[1:])
        if self.rest >= max(len(way), 1):
            anywhere = self.closer.ways.free(self.matcher)
            if anywhere:
                self._classes()
            self._each(anywhere)
        self.words[:] = self.allowed
        self.guide._spare = tuple(self.spare)

    def _allow(self, token: int, way: Way) -> None:
        self.allowed[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))
        self.guide._tried[token] = way

    def _behind(self, tokens: Sequence[int]) -> Way | None:
        """A way to the end from behind these tokens, if there is one that can be afforded."""
        way, end = self.guide._way, self.closer.end
        if self.matcher.validate((*tokens, *way, end)) > len(tokens) + len(way):
            return way
        if len(tokens) == 1:
            same = self.closer.after(way, tokens[0])
            if same is not None:
                return same if len(same) <= self.rest else None
            for known in self.closer.known(tokens[0]):
                fits = len(known) + ROOM <= self.rest
                if fits and self.matcher.validate((*tokens, *known, end)) > len(known) + 1:
                    return known
        for place, token in enumerate(tokens):
            if not self.matcher.accept(token):
                self.matcher.rollback(place)
                return None
        found = self.closer.ways.find(self.matcher, EFFORT_EACH)
        self.matcher.rollback(len(tokens))
        if found is None:
            return None
        if len(tokens) == 1:
            self.closer.learn(tokens[0], tuple(found))
        return tuple(found) if len(found) <= self.rest else None

    def _classes(self) -> None:
        """Where anything may stand: what keeps within it, and what ends a string with its quote."""
        closer = self.closer
        wide = closer.ways.wide(self.matcher)
        slack = closer.bounds.mark if wide else closer.bounds.within
        if self._all_afford([(one,) for one in closer.ways.garbage], slack):
            self.allowed |= self.words & (closer.text if wide else closer.within)
        if not wide and closer.quote is not None:
            ends = [(one, closer.quote) for one in closer.ways.garbage]
            if self._all_afford(ends, 0):
                self.allowed |= self.words & closer.quoted

    def _all_afford(self, trials: Sequence[tuple[int, ...]], slack: int) -> bool:
        ways = [self._behind(one) for one in trials]
        known = [one for one in ways if one is not None]
        self.spare += known
        return len(known) == len(ways) and max(map(len, known)) + slack <= self.rest

    def _each(self, anywhere: bool) -> None:
        """Single tokens, the likeliest first."""
        spelling = self.closer.spelling
        tokens = spelling.tokens(self.words & ~self.allowed)
        if anywhere:
            tokens = [one for one in (self.closer.quote,) if one in tokens]
        elif len(tokens) > MOST_TRIED:
            short = spelling.tokens(self.words & spelling.short & ~self.allowed)
            tokens = sorted(short, key=lambda one: _likely(spelling.pieces[one]))[:MOST_TRIED]
        for token in tokens:
            way = self._behind((token,))
            if way is not None and len(way) <= self.rest:
                self._allow(token, way)


def fill_all(work: Sequence[tuple[Guide, int]], words: Words, fill: FillAll | None = None) -> None:
    """The i-th guide, with what is left to it, fills words[i].

    fill: a Compiler.fill_all that made all of their matchers, which fills them in parallel.
    """
    if fill is None:
        for row, (guide, _) in enumerate(work):
            guide.matcher.fill(words[row])
    else:
        fill([(row, guide.matcher) for row, (guide, _) in enumerate(work)], words)
    for row, (guide, left) in enumerate(work):
        guide.narrow(words[row], left)
