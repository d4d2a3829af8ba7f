"""Length-aware closing: constrained text is whole at any budget from an announced least upwards.

    Guide(matcher, closer)    one for each sequence, in place of its matcher; quire.grammar.closer

A token that was drawn cannot be taken back, so the mask before must leave only tokens after which
the text can still be closed in what is left. `left` counts the tokens that may still be drawn, the
one that the mask is for included; the end token is not counted.

Far from its budget a text is free, and all that is done is a sum: how far the end can be at most
(quire.grammar.jumps). Where that does not fit, a way to the end is looked for on the matcher
(quire.grammar.ways). Where the way is so long that a single token might make it too long, only
tokens stay allowed that were tried (quire.grammar.trial).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.grammar.base import Matcher, Words
from quire.grammar.closer import ORDERS, Closer, Way, leads
from quire.grammar.trial import Trial, count

EFFORT_NOW = 400
"""Places that are looked at for a way to the end, between two steps."""
MOST_SPARE = 4
"""Ways that are kept from behind the end of a string."""
MOST_TAIL = 64
"""Bytes."""

FillAll = Callable[[Sequence[tuple[int, Matcher]], Words], None]


class _State(NamedTuple):
    """Of a guide, before it took a token."""

    token: int
    way: Way
    sure: bool
    bound: int
    spare: tuple[Way, ...]


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
        self._forced_at: int | None = None
        self._tried: dict[int, Way] = {}
        self._spare: tuple[Way, ...] = ()
        self.known: dict[int, tuple[Way, ...]] = {}
        """Ways that led on from a token before, the latest first. Of this text alone: what is
        allowed in one must not depend on others."""
        self._string: int | None = None
        """Within a string where anything may stand: tokens that follow a quote with text before it,
        at most."""
        self._unseen = 0
        """Tokens that were taken since the last mask."""
        self._past: list[_State | int] = []
        """What was before each token; the token alone where it changed no more than the bound."""

    def fill(self, words: Words, left: int | None = None) -> None:
        """Write the mask of the next token. left: tokens that may be drawn, this one included."""
        self.matcher.fill(words)
        self.narrow(words, left)

    def far(self, left: int) -> bool:
        """Whatever token comes next, the end stays within what is left: nothing to narrow()."""
        closer = self._closer
        return closer is None or left - 1 - self._bound >= closer.heavy_jump

    def narrow(self, words: Words, left: int | None) -> None:
        """Take out of the matcher's own mask what the budget does not allow."""
        closer = self._closer
        if self._tried:
            self._tried = {}
        if self._forced_at == len(self._past):
            self._forced_at = None
        unseen, self._unseen = self._unseen, 0
        if closer is None or left is None or left - 1 - self._bound >= closer.heavy_jump:
            return
        if self.matcher.over or self._fits(words, left):
            return
        if unseen > 1:
            self._retrace(unseen, left)
        if self._string is not None and self._within(words, left, self._string):
            return
        self._string = None
        if not self._sure:
            self._find(left)
            if not self._sure or self._fits(words, left):
                return
        open_before = count(words)
        trial = Trial(self.matcher, closer, words, left, self._way, self.known, self._tail)
        trial.run()
        self._tried, self._spare = trial.tried, tuple(trial.spare)
        self._string = trial.string
        only_ends = not (words & ~closer.spelling.end_words).any()
        one_way = open_before > 1 and (only_ends or count(words) == 1)
        if self._forced_at is None and (one_way or trial.barred):
            self._forced_at = len(self._past)

    def _retrace(self, count: int, left: int) -> None:
        """Tokens came without masks: a sequence that was preempted is back. Go their way again as
        it was gone, budgets and all, so that what was known of the way on is known again."""
        closer = self._closer
        assert closer is not None
        past = self._past[-count:]
        far = [
            left + count - at - 1 - bound >= closer.heavy_jump
            for at, bound in enumerate(self._bounds(past))
        ]
        start = far.index(False) if False in far else count
        self.rollback(count - start)
        words = np.zeros_like(closer.spelling.short)
        for at in range(start, count):
            self._unseen = 0
            self.fill(words, left + count - at)
            self.accept(_token(past[at]))
        self._unseen = 0

    def _bounds(self, past: Sequence[_State | int]) -> list[int]:
        """What the bound was before each of the last tokens."""
        closer, bound, found = self._closer, self._bound, []
        assert closer is not None
        for one in reversed(past):
            bound = bound - closer.growth(one) if isinstance(one, int) else one.bound
            found.append(bound)
        return found[::-1]

    @property
    def _tail(self) -> bytes:
        """The end of the text."""
        closer = self._closer
        assert closer is not None
        pieces = closer.spelling.pieces
        return b"".join(pieces[_token(one)] for one in self._past[-MOST_TAIL:])[-MOST_TAIL:]

    def _within(self, words: Words, left: int, quoted: int) -> bool:
        """Still within the string that was tried: the way leads from here too, so nobody has to try
        again. False: that is not so, or not known."""
        closer, way = self._closer, self._way
        assert closer is not None
        assert closer.quote is not None
        behind = closer.after(way, closer.quote) if way else None
        free = not (closer.garbage_words & ~words).any()
        if not free or behind is None or len(way) > left or not self._leads(way):
            return False
        spare = (behind, *(one for one in self._spare if one != behind))[:MOST_SPARE]
        self._take(way)
        self._spare = spare  # what ends the string takes one of these, and a search might miss it
        self._tried[way[0]] = way[1:]
        allowed = closer.words_of(way[0])
        if len(behind) < left:
            self._tried[closer.quote] = behind
            allowed |= closer.quote_words
        goes_on = len(way) + closer.bounds.within <= left - 1
        if goes_on:
            allowed = allowed | closer.within
        if quoted <= left - 1:
            allowed = allowed | closer.quoted
        words &= allowed
        if self._forced_at is None and (not goes_on or count(words) == 1):
            self._forced_at = len(self._past)
        return True

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
        for way in closer.tails:
            if len(way) <= left and self._leads(way):
                self._take(way)
                return
        best: Way | None = None
        for first in ORDERS:
            found = closer.ways.find(matcher, EFFORT_NOW, first, self._tail)
            if found is not None and (best is None or len(found) < len(best)):
                best = tuple(found)
            if best is not None and len(best) <= left:
                break
        if best is not None:
            self._take(best)

    def _leads(self, way: Way) -> bool:
        closer = self._closer
        assert closer is not None
        return leads(self.matcher, way, closer.end)

    def _take(self, way: Way) -> None:
        self._way, self._sure, self._bound, self._spare = way, True, len(way), ()

    def accept(self, token: int) -> bool:
        """Take the next token. False, and nothing changed: not allowed."""
        if not self.matcher.accept(token):
            return False
        closer = self._closer
        if closer is None:
            return True
        self._unseen += 1
        if not self._sure and not self._tried and self._string is None:
            self._past.append(token)
            self._bound += closer.growth(token)
            return True
        self._past.append(_State(token, self._way, self._sure, self._bound, self._spare))
        way = self._tried.get(token)
        if way is None and self._sure and self._way[:1] == (token,):
            way = self._way[1:]
        self._tried = {}
        if self._string is not None and not closer.stays(token):
            self._string = None
        if way is not None:
            self._take(way)
        else:
            self._sure = False
            self._bound += closer.growth(token)
        return True

    def recall(self, token: int, left: int) -> bool:
        """Take in again a token that was drawn before, when `left` might be: as accept(), with what
        making its mask had found out."""
        closer = self._closer
        if closer is not None and left - 1 - self._bound < closer.heavy_jump:
            self.fill(np.zeros_like(closer.spelling.end_words), left)
        return self.accept(token)

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens."""
        self.matcher.rollback(tokens)
        if self._closer is None or not tokens:
            return
        for one in reversed(self._past[-tokens:]):
            if isinstance(one, int):
                self._bound -= self._closer.growth(one)
            else:
                self._way, self._sure, self._bound = one.way, one.sure, one.bound
                self._spare = one.spare
        self._unseen = max(self._unseen - tokens, 0)
        del self._past[-tokens:]
        self._string = None
        self._tried = {}
        if self._forced_at is not None and self._forced_at >= len(self._past):
            self._forced_at = None

    def copy(self) -> Guide:
        """Another one in the same state."""
        other = Guide(self.matcher.copy(), self._closer)
        other._way, other._sure, other._bound = self._way, self._sure, self._bound
        other._tried, other._spare = dict(self._tried), self._spare
        other._forced_at, other._unseen = self._forced_at, self._unseen
        other.known = dict(self.known)
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
        """The budget, not the model, chose how the text goes on to its end."""
        return self._forced_at is not None

    @property
    def fault(self) -> str | None:
        """What broke the matcher for good."""
        return self.matcher.fault


def _token(past: _State | int) -> int:
    return past if isinstance(past, int) else past.token


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
