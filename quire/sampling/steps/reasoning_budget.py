"""Reasoning budget: forces the marker that ends the reasoning when the budget is used up.

Reasoning tokens come after the marker that begins a thought (or the prompt ends within one) and
before a marker that ends it; markers do not count. An end marker that the model has begun is
completed. A tool call ends reasoning too, as it does for the parsers of answers: the literal that
opens a call, followed by a token with which the call can continue. The token is forced by
quire.sampling.constrained_sequence.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from quire.core.types import CallOpener, ThinkingBudget

TokenSequence = tuple[int, ...]

MAX_OPENER_WHITESPACE = 16
"""Whitespace tokens between the opening literal of a call and its next token."""


@dataclass(slots=True)
class ReasoningBudget:
    """How far one sequence has come with its thinking."""

    params: ThinkingBudget
    in_reasoning: bool
    finished: bool = False  # no further reasoning can begin
    _num_outputs: int = 0  # outputs accepted
    _num_reasoning: int = 0  # reasoning tokens among them
    _markers: tuple[TokenSequence, ...] = ()  # of which one is to come; openers are the last
    _num_matched: list[int] = field(
        default_factory=list
    )  # by marker: tokens that the outputs end with
    _opener: CallOpener | None = None  # the last marker: the next token decides about it
    _num_opener: int = 0  # reasoning tokens that are the opener and whitespace after it

    @classmethod
    def from_params(cls, params: ThinkingBudget) -> ReasoningBudget:
        """Before the first output."""
        made = cls(params, in_reasoning=False)
        made._enter(in_reasoning=params.start_token_ids is None)
        return made

    def copy(self) -> ReasoningBudget:
        """Return another one in the same state."""
        made = copy(self)
        made._num_matched = [*self._num_matched]
        return made

    def accept(self, token: int) -> None:
        """Accept the next output."""
        self._num_outputs += 1
        if self.finished:
            return
        self._num_reasoning += self.in_reasoning
        if self._opener is not None and self._accept_after_opener(self._opener, token):
            return
        for i, marker in enumerate(self._markers):
            self._num_matched[i] = match_length(marker, self._num_matched[i], token)
            if self._num_matched[i] == len(marker):
                return self._accept_marker(i)

    def _accept_after_opener(self, opener: CallOpener, token: int) -> bool:
        """The token after the literal that opens a call. False: it is reasoning like any other."""
        self._num_opener += 1
        if token in opener.next_token_ids:
            self._leave_reasoning(self._num_opener)
            return True
        is_whitespace = token in self.params.whitespace_ids
        if is_whitespace and self._num_opener <= len(opener.token_ids) + MAX_OPENER_WHITESPACE:
            return True
        self._opener = None
        return False

    def _accept_marker(self, i: int) -> None:
        length = len(self._markers[i])
        if not self.in_reasoning:
            self._enter(in_reasoning=True)
            return
        openers = self.params.call_openers
        at = i - (len(self._markers) - len(openers))
        if at < 0:
            self._leave_reasoning(length)
            return
        self._opener, self._num_opener = openers[at], length
        self._num_matched = [0] * len(self._markers)

    def _leave_reasoning(self, num_marker: int) -> None:
        """num_marker: the last tokens that are a marker, not reasoning."""
        self._num_reasoning -= num_marker
        self.finished = self.params.start_token_ids is None
        self._enter(in_reasoning=False)

    def _enter(self, *, in_reasoning: bool) -> None:
        self.in_reasoning, self._opener = in_reasoning, None
        params = self.params
        openers = (one.token_ids for one in params.call_openers)
        self._markers = (
            (params.end_token_ids, *params.other_end_token_ids, *openers)
            if in_reasoning
            else (params.start_token_ids or (),)
        )
        self._num_matched = [0] * len(self._markers)

    def may_force(self, outputs: int) -> bool:
        """Whether a token may have to be forced after so many outputs, accepted or not."""
        if self.finished:
            return False
        unseen = outputs - self._num_outputs
        if not self.in_reasoning:
            unseen -= len(self._markers[0]) - self._num_matched[0]
        return unseen >= 0 and self._num_reasoning + unseen >= self.params.max_tokens

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, once all outputs are accepted; None: any may.

        None within and behind the literal that opens a call, until it is decided whether a call
        follows.
        """
        if self.finished or not self.in_reasoning or self._opener is not None:
            return None
        first_opener = len(self._markers) - len(self.params.call_openers)
        num_begun = max(self._num_matched[first_opener:], default=0)
        if self._num_reasoning - num_begun < self.params.max_tokens:
            return None
        return self.params.end_token_ids[self._num_matched[0]]


def match_length(marker: TokenSequence, before: int, token: int) -> int:
    """How much of the marker the outputs end with, after one more token behind `before` of it."""
    if not before:
        return int(marker[0] == token)
    tail = (*marker[:before], token)
    while tail and tail != marker[: len(tail)]:
        tail = tail[1:]
    return len(tail)
