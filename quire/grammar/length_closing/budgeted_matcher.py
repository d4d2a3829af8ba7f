"""BudgetedMatcher: completes constrained text within its token budget.

A drawn token cannot be taken back, so each mask allows only tokens after which the text can be
completed in what is left. `left` counts the tokens that may be drawn, this one included and the end
token not.

Far from the budget the only work is a sum: how far away the end can be at most (completion_bounds).
Where that does not fit, a path to the end is searched on the matcher (shortest_completion). Where a
single token might make the path too long, only tokens that were tried stay allowed (token_probe).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.length_closing.completion_plan import (
    ORDERS,
    CompletionPlan,
    TokenPath,
    leads_to_end,
)
from quire.grammar.length_closing.token_probe import TokenProbe, count_bits

SEARCH_EFFORT = 400
"""Places that are looked at for a way to the end, between two steps."""
MAX_ALTERNATIVES = 4
"""Ways that are kept from behind the end of a string."""
MAX_TAIL_BYTES = 64
"""Bytes."""

INCOMPLETE = (
    "no short end of the text was found in time, so that it would be cut off at max_tokens: raise "
    "max_tokens, or use a simpler form"
)

FillBitmasks = Callable[[Sequence[tuple[int, Matcher]], MaskWords], None]


class _MatcherState(NamedTuple):
    """Of a guide, before it took a token."""

    token: int
    path: TokenPath
    path_known: bool
    bound: int
    alternatives: tuple[TokenPath, ...]


class BudgetedMatcher:
    """A matcher with a budget. Without a completion plan it allows all that the matcher allows."""

    def __init__(self, matcher: Matcher, closer: CompletionPlan | None = None) -> None:
        self.matcher = matcher
        self._plan = closer
        self._path: TokenPath = closer.path if closer else ()
        self._path_known = True
        """The way leads from here to the end; otherwise it did from some tokens ago."""
        self._bound = len(self._path)
        """The end is no farther off than this, but for the slack."""
        self._fault: str | None = None
        self._forced_at: int | None = None
        self._probe: dict[int, TokenPath] = {}
        self._alternatives: tuple[TokenPath, ...] = ()
        self.known: dict[int, tuple[TokenPath, ...]] = {}
        """Ways that led on from a token before, the latest first. Of this text alone: what is
        allowed in one must not depend on others."""
        self._string: int | None = None
        """Within a string of any text: tokens that follow a quote with text before it,
        at most."""
        self._unmasked_tokens = 0
        """Tokens that were taken since the last mask."""
        self._history: list[_MatcherState | int] = []
        """What was before each token; the token alone where it changed no more than the bound."""

    def fill_bitmask(self, words: MaskWords, left: int | None = None) -> None:
        """Write the mask of the next token. left: tokens that may be drawn, this one included."""
        self.matcher.fill_bitmask(words)
        self.apply_budget(words, left)

    def is_within_budget(self, left: int) -> bool:
        """Whatever token comes next, the end stays within what is left: nothing to narrow()."""
        closer = self._plan
        return closer is None or left - 1 - self._bound >= closer.heavy_jump

    def apply_budget(self, words: MaskWords, left: int | None) -> None:
        """Take out of the matcher's own mask what the budget does not allow."""
        closer = self._plan
        if self._probe:
            self._probe = {}
        if self._forced_at == len(self._history):
            self._forced_at = None
        unseen, self._unmasked_tokens = self._unmasked_tokens, 0
        if closer is None or left is None or left - 1 - self._bound >= closer.heavy_jump:
            return
        if self.matcher.is_terminated or self._fits_budget(words, left):
            return
        if unseen > 1:
            self._replay(unseen, left)
        if self._string is not None and self._reuse_string_mask(words, left, self._string):
            return
        self._string = None
        if not self._path_known:
            self._find_path(left)
            if not self._path_known and left == 1:
                self._fault = INCOMPLETE
                words[:] = closer.token_classes.eos_mask
            if not self._path_known or self._fits_budget(words, left):
                return
        open_before = count_bits(words)
        trial = TokenProbe(
            self.matcher, closer, words, left, self._path, self.known, self._text_tail
        )
        trial.run()
        self._probe, self._alternatives = trial.tried, tuple(trial.alternatives)
        self._string = trial.string
        only_ends = not (words & ~closer.token_classes.eos_mask).any()
        one_way = open_before > 1 and (only_ends or count_bits(words) == 1)
        if self._forced_at is None and (one_way or trial.barred):
            self._forced_at = len(self._history)

    def _replay(self, count: int, left: int) -> None:
        """Tokens came without masks: a sequence that was preempted is back. Go their way again as
        it was gone, budgets and all, so that what was known of the way on is known again."""
        closer = self._plan
        assert closer is not None
        past = self._history[-count:]
        is_within_budget = [
            left + count - at - 1 - bound >= closer.heavy_jump
            for at, bound in enumerate(self._bounds(past))
        ]
        start = is_within_budget.index(False) if False in is_within_budget else count
        self.rollback(count - start)
        words = np.zeros_like(closer.token_classes.short)
        for at in range(start, count):
            self._unmasked_tokens = 0
            self.fill_bitmask(words, left + count - at)
            self.accept(_token_of(past[at]))
        self._unmasked_tokens = 0

    def _bounds(self, past: Sequence[_MatcherState | int]) -> list[int]:
        """What the bound was before each of the last tokens."""
        closer, bound, found = self._plan, self._bound, []
        assert closer is not None
        for one in reversed(past):
            bound = bound - closer.max_growth(one) if isinstance(one, int) else one.bound
            found.append(bound)
        return found[::-1]

    @property
    def _text_tail(self) -> bytes:
        """The end of the text."""
        closer = self._plan
        assert closer is not None
        pieces = closer.token_classes.pieces
        return b"".join(pieces[_token_of(one)] for one in self._history[-MAX_TAIL_BYTES:])[
            -MAX_TAIL_BYTES:
        ]

    def _reuse_string_mask(self, words: MaskWords, left: int, quoted: int) -> bool:
        """Still within the string that was tried: the path leads from here too, without another
        try. False: that is not so, or not known."""
        closer, way = self._plan, self._path
        assert closer is not None
        assert closer.quote is not None
        behind = closer.advance(way, closer.quote) if way else None
        free = not (closer.filler_mask & ~words).any()
        if not free or behind is None or len(way) > left or not self._is_path_valid(way):
            return False
        spare = (behind, *(one for one in self._alternatives if one != behind))[:MAX_ALTERNATIVES]
        self._set_path(way)
        self._alternatives = (
            spare  # what ends the string takes one of these, and a search might miss it
        )
        self._probe[way[0]] = way[1:]
        allowed = closer.single_token_mask(way[0])
        if len(behind) < left:
            self._probe[closer.quote] = behind
            allowed |= closer.quote_mask
        goes_on = len(way) + closer.bounds.within <= left - 1
        if goes_on:
            allowed = allowed | closer.within
        if quoted <= left - 1:
            allowed = allowed | closer.quoted
        words &= allowed
        if self._forced_at is None and (not goes_on or count_bits(words) == 1):
            self._forced_at = len(self._history)
        return True

    def _fits_budget(self, words: MaskWords, left: int) -> bool:
        """No token, or none that opens one thing at most, can lead too far away: done then."""
        closer = self._plan
        assert closer is not None
        spare = left - 1 - self._bound
        if spare >= closer.heavy_jump:
            return True
        if spare < closer.light_jump:
            return False
        light = words & closer.token_classes.light
        if not light.any():
            return False
        words[:] = light
        return True

    def _find_path(self, left: int) -> None:
        """Make the way one that leads from here."""
        closer, matcher = self._plan, self.matcher
        assert closer is not None
        if matcher.is_complete:
            self._set_path(())
            return
        for way in (self._path, *self._alternatives):
            if way and len(way) <= left and self._is_path_valid(way):
                self._set_path(way)
                return
        for way in closer.tails:
            if len(way) <= left and self._is_path_valid(way):
                self._set_path(way)
                return
        best: TokenPath | None = None
        for first in ORDERS:
            found = closer.search.find(matcher, SEARCH_EFFORT, first, self._text_tail)
            if found is not None and (best is None or len(found) < len(best)):
                best = tuple(found)
            if best is not None and len(best) <= left:
                break
        if best is not None:
            self._set_path(best)

    def _is_path_valid(self, way: TokenPath) -> bool:
        closer = self._plan
        assert closer is not None
        return leads_to_end(self.matcher, way, closer.end)

    def _set_path(self, way: TokenPath) -> None:
        self._path, self._path_known, self._bound, self._alternatives = way, True, len(way), ()

    def accept(self, token: int) -> bool:
        """Take the next token. False, and nothing changed: not allowed."""
        if not self.matcher.accept(token):
            return False
        closer = self._plan
        if closer is None:
            return True
        self._unmasked_tokens += 1
        if not self._path_known and not self._probe and self._string is None:
            self._history.append(token)
            self._bound += closer.max_growth(token)
            return True
        self._history.append(
            _MatcherState(token, self._path, self._path_known, self._bound, self._alternatives)
        )
        way = self._probe.get(token)
        if way is None and self._path_known and self._path[:1] == (token,):
            way = self._path[1:]
        self._probe = {}
        if self._string is not None and not closer.stays_in_string(token):
            self._string = None
        if way is not None:
            self._set_path(way)
        else:
            self._path_known = False
            self._bound += closer.max_growth(token)
        return True

    def accept_replayed(self, token: int, left: int) -> bool:
        """Take in again a token that was drawn before, when `left` might be: as accept(), with what
        making its mask had found out."""
        closer = self._plan
        if closer is not None and left - 1 - self._bound < closer.heavy_jump:
            self.fill_bitmask(np.zeros_like(closer.token_classes.eos_mask), left)
        return self.accept(token)

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens."""
        self.matcher.rollback(tokens)
        if self._plan is None or not tokens:
            return
        for one in reversed(self._history[-tokens:]):
            if isinstance(one, int):
                self._bound -= self._plan.max_growth(one)
            else:
                self._path, self._path_known, self._bound = one.path, one.path_known, one.bound
                self._alternatives = one.alternatives
        self._unmasked_tokens = max(self._unmasked_tokens - tokens, 0)
        del self._history[-tokens:]
        self._string = self._fault = None
        self._probe = {}
        if self._forced_at is not None and self._forced_at >= len(self._history):
            self._forced_at = None

    def copy(self) -> BudgetedMatcher:
        """Another one in the same state."""
        other = BudgetedMatcher(self.matcher.copy(), self._plan)
        other._path, other._path_known, other._bound = self._path, self._path_known, self._bound
        other._probe, other._alternatives = dict(self._probe), self._alternatives
        other._forced_at, other._unmasked_tokens = self._forced_at, self._unmasked_tokens
        other._fault, other._string = self._fault, self._string
        other.known = dict(self.known)
        other._history = list(self._history)
        return other

    @property
    def is_complete(self) -> bool:
        """The text so far is whole."""
        return self.matcher.is_complete

    @property
    def is_terminated(self) -> bool:
        """Only the end can follow, or has."""
        return self.matcher.is_terminated

    @property
    def forced(self) -> bool:
        """The budget, not the model, chose how the text ends."""
        return self._forced_at is not None

    @property
    def fault(self) -> str | None:
        """What broke the matcher for good, or why the text cannot be completed any more."""
        return self.matcher.fault or self._fault


def _token_of(past: _MatcherState | int) -> int:
    return past if isinstance(past, int) else past.token
