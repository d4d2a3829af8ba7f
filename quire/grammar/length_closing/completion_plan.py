"""Completion data of a form: its shortest text, bounds, and what matchers of one grammar share.

    find_min_completion(form, matcher, token_classes)  slow, in the compile worker; plain data
    build_completion_plan(...) -> CompletionPlan       once for each grammar, in the engine

A path is the tokens that complete a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.grammar_ast import GrammarNode
from quire.grammar.length_closing.completion_bounds import CompletionBounds, completion_bounds
from quire.grammar.length_closing.shortest_completion import CompletionSearch
from quire.grammar.length_closing.token_classes import TokenClasses

SEARCH_EFFORT = 4_000
"""Places that are looked at for the shortest text of a form, in each order of trying."""
EXTRA_SEARCH_EFFORT = 150
"""The same where a text was made from the form: it is nearly always the shortest."""
MAX_TAILS = 24
"""Ends of the shortest text that are tried before a way is looked for."""
MAX_VALUES = 64
VALUES = (b"true", b"false", b"null", b'""', b"[]", b"{}", b"-0", *b"0 1 2 3 4 5 6 7 8 9".split())
ORDERS = (b"", b"0", b'"', b"n", b"[", b"{")

TokenPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MinCompletion:
    """What closing has to know of a form. Plain data, which goes over a pipe."""

    min_tokens: int | None = None
    """Fewest tokens of a whole text; None: texts of this form are not completed."""
    path: TokenPath = ()
    """That text."""
    bounds: CompletionBounds | None = None
    tails: tuple[TokenPath, ...] = ()
    """Ends of that text, the shortest first: what most often closes any text."""


def find_min_completion(
    form: GrammarNode, matcher: Matcher, spelling: TokenClasses
) -> MinCompletion:
    """Find the shortest text of the form. matcher: a fresh one of it. Slow."""
    known = completion_bounds(form, spelling)
    if known is None:
        return MinCompletion()
    seeker = CompletionSearch(known, spelling)
    made = None if known.text is None else seeker.tokenize(known.text)
    texts: list[TokenPath] = []
    if made is not None and leads_to_end(matcher, made, spelling.eos_tokens[0]):
        texts.append(made)
    for first in ORDERS[: 1 if texts else None]:
        found = seeker.find_shortest(
            matcher, EXTRA_SEARCH_EFFORT if texts else SEARCH_EFFORT, first
        )
        if found is not None:
            texts.append(tuple(found))
    if not texts:
        return MinCompletion()
    shortest = min(texts, key=len)
    return MinCompletion(len(shortest), shortest, known, tuple(_tails(shortest, spelling)))


def _tails(way: TokenPath, spelling: TokenClasses) -> Iterator[TokenPath]:
    if spelling.special & {*way}:
        return
    text = b"".join(spelling.pieces[one] for one in way)
    for at in range(len(text) - 1, max(len(text) - MAX_TAILS, 0) - 1, -1):
        found = spelling.fewest(text[at:])
        if found is not None:
            yield found


def build_completion_plan(least: MinCompletion, spelling: TokenClasses) -> CompletionPlan | None:
    """What guides of that form share. None: it is not closed."""
    if least.bounds is None:
        return None
    return CompletionPlan(least.path, least.bounds, spelling, least.tails)


class CompletionPlan:
    """What the guides of one grammar share. Never changed."""

    def __init__(
        self,
        way: TokenPath,
        known: CompletionBounds,
        spelling: TokenClasses,
        tails: tuple[TokenPath, ...] = (),
    ) -> None:
        self.path, self.tails = way, tails
        self.bounds = known
        self.token_classes = spelling
        self.search = CompletionSearch(known, spelling)
        self.end = spelling.eos_tokens[0]
        self.quote = spelling.ids.get(b'"')
        self.quote_mask = spelling.mask_of([] if self.quote is None else [self.quote])
        self.filler_mask = spelling.mask_of(self.search.garbage)
        values = [one.encode() for one in known.literals[:MAX_VALUES]]
        self.values = (*values, *VALUES)
        self.base = 0 if known.plain else known.jump
        self._weights = spelling.weights
        self._growths = [self.base + known.jump * weight for weight in range(256)]
        self.light_jump = self.base + known.jump + known.slack
        self.heavy_jump = self.base + known.jump * max(spelling.heaviest, 1) + known.slack
        beyond = spelling.mask_of(_mark_ending_tokens(known.marks, spelling))
        self.text = spelling.text & ~beyond
        self.within = spelling.within & ~beyond
        self.quoted = spelling.quoted & ~spelling.mask_of(
            _name_ending_tokens(known.names, spelling)
        )

    def advance(self, way: TokenPath, token: int) -> TokenPath | None:
        """What is left of a way behind a token that writes its beginning, but for white space.
        None: it does not."""
        token_classes = self.token_classes
        if token in token_classes.special:
            return way[1:] if way[:1] == (token,) else None
        text, place = b"", 0
        while place < len(way) and way[place] not in token_classes.special:
            text += token_classes.pieces[way[place]]
            place += 1
        piece = token_classes.pieces[token]
        if not text.startswith(piece):
            piece = b"".join(piece.split())
            if not piece or not text.startswith(piece):
                return None
        rest = token_classes.fewest(text[len(piece) :])
        return None if rest is None else rest + way[place:]

    def substitute(self, way: TokenPath, token: int) -> TokenPath | None:
        """What is left of a way that begins with a value of the form's, behind a token that begins
        another value. None: nothing is known."""
        token_classes = self.token_classes
        text = self.path_text(way)
        begun = next((one for one in self.values if text.startswith(one)), None)
        if begun is None or token in token_classes.special:
            return None
        piece = token_classes.pieces[token]
        other = next((one for one in self.values if one.startswith(piece) and one != begun), None)
        if other is None:
            return None
        return token_classes.fewest(other[len(piece) :] + text[len(begun) :])

    def path_text(self, way: TokenPath) -> bytes:
        """What a way writes, up to a special token."""
        pieces, special = self.token_classes.pieces, self.token_classes.special
        return b"".join(pieces[one] for one in itertools.takewhile(lambda t: t not in special, way))

    def single_token_mask(self, token: int) -> MaskWords:
        """A mask of one token."""
        words = np.zeros_like(self.quote_mask)
        words.view(np.uint32)[token >> 5] = 1 << (token & 31)
        return words

    def stays_in_string(self, token: int) -> bool:
        """Within a string, the token stays within it."""
        return bool(self.within[token >> 5] >> (token & 31) & 1)

    def max_growth(self, token: int) -> int:
        """How much farther off the end may be behind this token, but for the slack."""
        return self._growths[self._weights[token]]


def _mark_ending_tokens(marks: Sequence[str], spelling: TokenClasses) -> list[int]:
    """Tokens that may end a mark that begins before them, or that contain one."""
    found: list[int] = []
    for mark in marks:
        data = mark.encode()
        found += spelling.tokens_containing(data)
        for at in range(1, len(data)):
            found += spelling.tokens_with_prefix(data[at:])
    return found


def _name_ending_tokens(names: Sequence[str], spelling: TokenClasses) -> list[int]:
    """Tokens that may end a name with its quote: then it is that name. The quote alone does."""
    texts = {b'"'}
    for name in names:
        data = name.encode()
        texts.update(data[at:] + b'"' for at in range(len(data)))
    return [spelling.ids[text] for text in texts if text in spelling.ids]


def leads_to_end(matcher: Matcher, tokens: Sequence[int], end: int) -> bool:
    """The tokens lead from here to an end. Whether they can be taken at all is quickly seen."""
    count = len(tokens)
    return matcher.validate(tokens) == count and matcher.validate((*tokens, end)) > count
