"""Reasoning budget: forces the marker that ends the reasoning when the budget is used up.

Reasoning tokens come after the marker that begins a thought (or the prompt ends within one) and
before the marker that ends it; markers do not count. An end marker that the model has begun is
completed. quire.sampling.constrained_sequence forces the token.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.types import ThinkingBudget

TokenSequence = tuple[int, ...]


@dataclass(slots=True)
class ReasoningBudget:
    """How far one sequence has come with its thinking."""

    params: ThinkingBudget
    in_reasoning: bool
    finished: bool = False  # no further reasoning can begin
    _num_outputs: int = 0  # outputs accepted
    _num_reasoning: int = 0  # reasoning tokens among them
    _num_matched: int = 0  # tokens of the next marker that the outputs end with

    @classmethod
    def from_params(cls, params: ThinkingBudget) -> ReasoningBudget:
        """Before the first output."""
        return cls(params, in_reasoning=params.start_token_ids is None)

    def accept(self, token: int) -> None:
        """Accept the next output."""
        self._num_outputs += 1
        if self.finished:
            return
        marker = self._next_marker
        self._num_matched = match_length(marker, self._num_matched, token)
        self._num_reasoning += self.in_reasoning
        if self._num_matched < len(marker):
            return
        self._num_matched = 0
        if self.in_reasoning:
            self._num_reasoning -= len(marker)
            self.finished = self.params.start_token_ids is None
        self.in_reasoning = not self.in_reasoning

    def may_force(self, outputs: int) -> bool:
        """Whether a token may have to be forced after so many outputs, accepted or not."""
        if self.finished:
            return False
        unseen = outputs - self._num_outputs
        if not self.in_reasoning:
            unseen -= len(self._next_marker) - self._num_matched
        return unseen >= 0 and self._num_reasoning + unseen >= self.params.max_tokens

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, once all outputs are accepted; None: any may."""
        if self.finished or not self.in_reasoning or self._num_reasoning < self.params.max_tokens:
            return None
        return self.params.end_token_ids[self._num_matched]

    @property
    def _next_marker(self) -> TokenSequence:
        """The one to come."""
        return self.params.end_token_ids if self.in_reasoning else self.params.start_token_ids or ()


def match_length(marker: TokenSequence, before: int, token: int) -> int:
    """How much of the marker the outputs end with, after one more token behind `before` of it."""
    if not before:
        return int(marker[0] == token)
    tail = (*marker[:before], token)
    while tail and tail != marker[: len(tail)]:
        tail = tail[1:]
    return len(tail)
