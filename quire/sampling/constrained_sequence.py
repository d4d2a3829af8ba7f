"""Constrained sequence: narrows the tokens of one sequence by a grammar, a thinking budget, or
both.

The matcher decides which tokens are allowed and when the text ends; min_tokens and the budget then
narrow its masks, as far as they leave a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec, Protocol, TypeVar

import numpy as np

from quire.core.constraint import Constraint
from quire.grammar.backends.base import MaskWords
from quire.grammar.length_closing.budgeted_matcher import BudgetedMatcher, FillBitmasks
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.reasoning_budget import ReasoningBudget

log = logging.getLogger(__name__)

FinishKind = Literal["stop", "length"]
P = ParamSpec("P")
T = TypeVar("T")


class MatcherFactory(Protocol):
    """A compiled grammar."""

    @property
    def fill_all(self) -> FillBitmasks:
        """Fills the masks of many of its matchers at once."""
        ...

    def guide(self) -> BudgetedMatcher:
        """A new matcher, for one sequence."""
        ...


class GrammarLookup(Protocol):
    """Holds compiled grammars: quire.grammar.compilation.grammar_cache."""

    def get(self, constraint: Constraint) -> MatcherFactory:
        """The grammar of a constraint, which is compiled."""
        ...


@dataclass(slots=True, eq=False)
class ConstrainedSequence:
    """Compared by identity: one per stay in a slot."""

    guide: BudgetedMatcher | None
    fill_all: FillBitmasks | None  # of the guide's matcher and its like
    reasoning_budget: ReasoningBudget | None
    max_outputs: int  # outputs at which it ends
    min_outputs: int  # outputs before which no token of `ends` may come
    end_ids: tuple[int, ...]
    accepted_ahead: bool = False  # its next output is accepted already
    finished: bool = False  # it has ended: its tokens in flight are dropped
    error: str | None = None  # why it must end
    refusal: str | None = None  # the same, if its request is at fault

    @classmethod
    def from_join(cls, joined: SlotJoin, ready: MatcherFactory | None) -> ConstrainedSequence:
        """ready: the grammar of its constraint, compiled; None: it has no constraint."""
        asked, stop = joined.thinking, joined.stop
        made = cls(
            None if ready is None else ready.guide(),
            None if ready is None else ready.fill_all,
            None if asked is None else ReasoningBudget.from_params(asked),
            max_outputs=joined.max_len - joined.prompt_len,
            min_outputs=0 if ready is None else stop.min_tokens,
            end_ids=tuple(sorted(stop.eos_ids | stop.token_ids)),
        )
        for outputs, token in enumerate(joined.output_tokens):
            made.accept(token, made.max_outputs - outputs)
        return made

    def copy(self) -> ConstrainedSequence:
        """Return another one in the same state."""
        guide, budget = self.guide, self.reasoning_budget
        return replace(
            self,
            guide=None if guide is None else guide.copy(),
            reasoning_budget=None if budget is None else budget.copy(),
        )

    def needs_mask(self, outputs: int) -> bool:
        """Whether the token after so many outputs may need a mask."""
        if self.finished:
            return False
        return self.guide is not None or (
            self.reasoning_budget is not None and self.reasoning_budget.may_force(outputs)
        )

    def accept_ahead(self, token: int) -> bool:
        """Accept the next output before it is committed, if the grammar allows it."""
        self.accepted_ahead = self.guide is not None and self.guide.accept(token)
        return self.accepted_ahead

    def is_grammar_only(self, outputs: int) -> bool:
        """Whether only the grammar applies after so many outputs, and narrow_mask() would not."""
        guide = self.guide
        return (
            guide is not None
            and not self.finished
            and self.reasoning_budget is None
            and outputs >= self.min_outputs
            and guide.is_within_budget(self.max_outputs - outputs)
        )

    def accept(self, token: int, left: int | None = None) -> FinishKind | None:
        """Accept the next output. Returns how the text ends with it, if it does.

        left: tokens that were left when an earlier stay in a slot drew the output.
        """
        if self.reasoning_budget is not None:
            self.reasoning_budget.accept(token)
        guide = self.guide
        if guide is None:
            return None
        if left is not None:
            allowed = guide.accept_replayed(token, left)
        else:
            allowed = self.accepted_ahead or guide.accept(token)
            self.accepted_ahead = False
        if allowed and not guide.is_terminated:
            return None
        self.refusal = guide.fault  # what has one is over too
        if self.refusal is not None:
            return None
        if not allowed:
            self.error = f"the grammar of the output does not allow token {token}"
            return None
        self.finished = True
        return "length" if guide.forced else "stop"

    def run_guarded(self, what: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Its result; an exception ends this sequence and no other."""
        try:
            return what(*args, **named)
        except Exception as error:
            log.exception("a grammar or a budget failed")
            self.error = f"{type(error).__name__}: {error}"
            return None

    @property
    def failed(self) -> bool:
        """Whether it must end without a token."""
        return self.error is not None or self.refusal is not None

    def narrow_mask(self, words: MaskWords, outputs: int) -> None:
        """Clear in the matcher's mask what else may not follow so many outputs."""
        if self.guide is not None:
            self.guide.apply_budget(words, self.max_outputs - outputs)
            self.refusal = self.guide.fault
        if outputs < self.min_outputs and self.end_ids:
            keep = words.copy()
            for token in self.end_ids:
                _clear_bit(words, token)
            if not words.any():
                words[:] = keep
        forced = None if self.reasoning_budget is None else self.reasoning_budget.forced_token
        if forced is not None and _has_bit(words, forced):
            words[:] = 0
            words.view(np.uint32)[forced // 32] = 1 << forced % 32


def _clear_bit(words: MaskWords, token: int) -> None:
    if token < 32 * len(words):
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)


def _has_bit(words: MaskWords, token: int) -> bool:
    return token < 32 * len(words) and bool(words.view(np.uint32)[token // 32] >> token % 32 & 1)
