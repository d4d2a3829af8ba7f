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

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
EFFORT_NOW = 400
"""The same between two steps."""
EFFORT_EACH = 60
"""The same for one token that is tried."""
EFFORT_ALL = 100
"""The same for all tokens that are tried before a step."""
MOST_TRIED = 12
"""Tokens that are tried before a step."""
MOST_SPARE = 4
"""Ways that are kept from behind the end of a string."""
MOST_LISTED = 2000
"""Where more short tokens may come, they are pieces of a text that the form says much of."""
MOST_TAIL = 64
"""Bytes."""
MOST_FOUND = 24
"""Where the end may come farther off than this, looking for it with such effort is in vain."""
ROOM = 8
"""Tokens by which a way that is known from elsewhere must be shorter than it has to be: where there
is less room, the shortest is looked for, if it could be much shorter."""
SHORT_WAY = 4
MOST_TAILS = 24
"""Ends of the shortest text that are tried before a way is looked for."""
MOST_WAYS = 6
MOST_VALUES = 64
VALUES = (b"true", b"false", b"null", b'""', b"[]", b"{}", b"-0", *b"0 1 2 3 4 5 6 7 8 9".split())
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
    if made is not None and _leads(matcher, made, spelling.ends[0]):
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


def closer(least: Least, spelling: Spelling) -> Closer | None:
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


def _token(past: _State | int) -> int:
    return past if isinstance(past, int) else past.token


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
        open_before = _count(words)
        trial = _Trial(self, closer, words, left)
        trial.run()
        only_ends = not (words & ~closer.spelling.end_words).any()
        one_way = open_before > 1 and (only_ends or _count(words) == 1)
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
        if self._forced_at is None and (not goes_on or _count(words) == 1):
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
        return _leads(self.matcher, way, closer.end)

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
        self.effort = EFFORT_ALL
        self.barred = False
        """Anything could have stood here, but for the budget."""

    def run(self) -> None:
        way = self.guide._way
        if way:
            self._allow(way[0], way[1:])
        if self.rest >= max(len(way), 1):
            mask = self.closer.ways.here(self.matcher)
            anywhere = self.closer.ways.free(mask)
            if anywhere:
                self._classes(self.closer.ways.wide(mask))
            self._each(anywhere)
        self.words[:] = self.allowed
        self.guide._spare = tuple(self.spare)

    def _allow(self, token: int, way: Way) -> None:
        self.allowed[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))
        self.guide._tried[token] = way

    def _behind(self, tokens: Sequence[int]) -> Way | None:
        """A way to the end from behind these tokens, if there is one that can be afforded."""
        way = self.guide._way
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
            for known in self.guide.known.get(tokens[0], ()):
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
        tail = self.guide._tail + b"".join(pieces[token] for token in tokens)
        found = self.closer.ways.find(self.matcher, EFFORT_EACH, tail=tail)
        self.matcher.rollback(len(tokens))
        self.effort -= EFFORT_EACH if found is None else len(found)
        if found is None:
            return None
        if len(tokens) == 1:
            others = [one for one in self.guide.known.get(tokens[0], ()) if one != tuple(found)]
            self.guide.known[tokens[0]] = (tuple(found), *others[: MOST_WAYS - 1])
        return tuple(found) if len(found) <= self.rest else None

    def _leads(self, tokens: Sequence[int], way: Way) -> bool:
        return _leads(self.matcher, (*tokens, *way), self.closer.end)

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
                self.guide._string = max(map(len, self.spare[before:]))

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
            if _count(others) > MOST_TRIED:
                others &= spelling.short
        tokens = spelling.tokens(others) if _count(others) <= MOST_LISTED else []
        for token in sorted(tokens, key=lambda one: _likely(spelling.pieces[one]))[:MOST_TRIED]:
            way = self._behind((token,))
            if way is not None and len(way) <= self.rest:
                self._allow(token, way)


def _count(words: Words) -> int:
    """Bits that are set."""
    return int.from_bytes(words.tobytes(), "little").bit_count()


def _leads(matcher: Matcher, tokens: Sequence[int], end: int) -> bool:
    """The tokens lead from here to an end. Whether they can be taken at all is quickly seen."""
    count = len(tokens)
    return matcher.validate(tokens) == count and matcher.validate((*tokens, end)) > count


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
