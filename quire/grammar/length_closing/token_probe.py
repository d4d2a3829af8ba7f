"""Narrows one mask near the budget to the tokens after which the text can still be completed.

Tokens are tried on the matcher: one by one, or one for a class of tokens that is at least as bad as
each of them. The known path is always one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.length_closing.completion_plan import CompletionPlan, TokenPath, leads_to_end

EFFORT_PER_TOKEN = 60
"""Places that are looked at for a way to the end behind one token that is tried."""
EFFORT_PER_MASK = 100
"""The same for all tokens that are tried before a step."""
MAX_PROBED = 12
"""Tokens that are tried before a step."""
MAX_LISTED = 2000
"""With more short tokens than this the form names much of the text."""
MAX_FOUND = 24
"""Where the end may come farther off than this, looking for it with such effort is in vain."""
MIN_SLACK_TOKENS = 8
"""Tokens by which a way that is known from elsewhere must be shorter than it has to be: where there
is less left, the shortest is searched, if it could be much shorter."""
SHORT_PATH = 4
MAX_PATHS = 6
LIKELY_FIRST_BYTES = b',"{[}]:tfn-.0123456789'


class TokenProbe:
    """What was tried for one mask, and what came of it."""

    def __init__(
        self,
        matcher: Matcher,
        closer: CompletionPlan,
        words: MaskWords,
        left: int,
        way: TokenPath,
        known: dict[int, tuple[TokenPath, ...]],
        tail: bytes,
    ) -> None:
        """words: the matcher's mask, which run() narrows. way: one that leads from here.

        known: ways that led on from a token before; more are added. tail: the end of the text.
        """
        self.matcher = matcher
        self.plan = closer
        self.words = words
        self.rest = left - 1
        self.path, self.known, self.tail = way, known, tail
        self.tried: dict[int, TokenPath] = {}
        """A way for each token that was tried alone and may come."""
        self.string: int | None = None
        """Within a string of any text: tokens that follow a quote with text before it,
        at most."""
        self.allowed = words & closer.token_classes.eos_mask
        self.alternatives: list[TokenPath] = []
        """Ways from behind the end of a string."""
        self.effort = EFFORT_PER_MASK
        self.barred = False
        """Anything could have stood here, but for the budget."""

    def run(self) -> None:
        path = self.path
        if path:
            self._allow(path[0], path[1:])
        if self.rest >= max(len(path), 1):
            mask = self.plan.search.allowed_tokens(self.matcher)
            anywhere = self.plan.search.is_free_text(mask)
            if anywhere:
                self._probe_classes(self.plan.search.is_outside_string(mask))
            self._probe_tokens(anywhere)
        self.words[:] = self.allowed

    def _allow(self, token: int, way: TokenPath) -> None:
        self.allowed[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))
        self.tried[token] = way

    def _find_path_after(self, tokens: Sequence[int]) -> TokenPath | None:
        """A way to the end from behind these tokens, if there is one that can be afforded."""
        path = self.path
        if self._is_path_valid(tokens, path):
            return path
        for begun in (path, path[1:]):  # a number may end before its next digit
            same = self.plan.advance(begun, tokens[-1]) if begun else None
            if same is not None and self._is_path_valid(tokens, same):
                return same if len(same) <= self.rest else None
        if path and self._is_path_valid(tokens, path[1:]):
            return path[1:]
        if len(tokens) == 1:
            other = self.plan.substitute(path, tokens[0])
            if other is not None and self._is_path_valid(tokens, other):
                return other if len(other) <= self.rest else None
            for known in self.known.get(tokens[0], ()):
                if len(known) <= max(
                    self.rest - MIN_SLACK_TOKENS, SHORT_PATH
                ) and self._is_path_valid(tokens, known):
                    return known if len(known) <= self.rest else None
        for end in self.plan.tails:
            if self._is_path_valid(tokens, end):
                return end if len(end) <= self.rest else None
        if self.effort <= 0 or self.plan.max_growth(tokens[0]) > MAX_FOUND:
            return None
        for place, token in enumerate(tokens):
            if not self.matcher.accept(token):
                self.matcher.rollback(place)
                return None
        pieces = self.plan.token_classes.pieces
        tail = self.tail + b"".join(pieces[token] for token in tokens)
        found = self.plan.search.find(self.matcher, EFFORT_PER_TOKEN, tail=tail)
        self.matcher.rollback(len(tokens))
        self.effort -= EFFORT_PER_TOKEN if found is None else len(found)
        if found is None:
            return None
        if len(tokens) == 1:
            others = [one for one in self.known.get(tokens[0], ()) if one != tuple(found)]
            self.known[tokens[0]] = (tuple(found), *others[: MAX_PATHS - 1])
        return tuple(found) if len(found) <= self.rest else None

    def _is_path_valid(self, tokens: Sequence[int], way: TokenPath) -> bool:
        return leads_to_end(self.matcher, (*tokens, *way), self.plan.end)

    def _probe_classes(self, wide: bool) -> None:
        """Within any text: what stays within it, and what ends a string with its quote."""
        plan = self.plan
        slack = plan.bounds.mark if wide else plan.bounds.within
        if self._all_affordable([(one,) for one in plan.search.garbage], slack):
            self.allowed |= self.words & (plan.text if wide else plan.within)
        else:
            self.barred = True
        if not wide and plan.quote is not None:
            ends = [(one, plan.quote) for one in plan.search.garbage]
            before = len(self.alternatives)
            if self._all_affordable(ends, 0):
                self.allowed |= self.words & plan.quoted
                self.string = max(map(len, self.alternatives[before:]))

    def _all_affordable(self, trials: Sequence[tuple[int, ...]], slack: int) -> bool:
        ways = [self._find_path_after(one) for one in trials]
        known = [one for one in ways if one is not None]
        self.alternatives += known
        return len(known) == len(ways) and max(map(len, known)) + slack <= self.rest

    def _probe_tokens(self, anywhere: bool) -> None:
        """Single tokens, the likeliest first."""
        spelling = self.plan.token_classes
        if anywhere:
            others = self.words & ~self.allowed & self.plan.quote_mask
        else:
            others = self.words & ~self.allowed
            if count_bits(others) > MAX_PROBED:
                others &= spelling.short
        tokens = spelling.tokens_of(others) if count_bits(others) <= MAX_LISTED else []
        for token in sorted(tokens, key=lambda one: _probe_priority(spelling.pieces[one]))[
            :MAX_PROBED
        ]:
            path = self._find_path_after((token,))
            if path is not None and len(path) <= self.rest:
                self._allow(token, path)


def _probe_priority(piece: bytes) -> int:
    """Which tokens are tried first, where there are many: what structures, then values."""
    if not piece:
        return 512
    place = LIKELY_FIRST_BYTES.find(piece[:1])
    return place if place >= 0 else len(LIKELY_FIRST_BYTES) + piece[0]


def count_bits(words: MaskWords) -> int:
    """Bits that are set."""
    return int.from_bytes(words.tobytes(), "little").bit_count()
