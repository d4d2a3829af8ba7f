"""A budget of thinking: when it is used up, the mark that ends the thought is forced.

Tokens of thought stand behind the mark that begins one (or the prompt ends within one) and before
the mark that ends it; marks do not count. What the model wrote of an end mark by itself is made
whole. Not here: how a token is forced (quire.sampling.constrained_sequence), and when tokens become
known.
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
    finished: bool = False  # there will be no thought any more
    _num_outputs: int = 0  # outputs taken in
    _num_reasoning: int = 0  # tokens of thought among them
    _num_matched: int = 0  # tokens of the next mark that the outputs end with

    @classmethod
    def from_params(cls, asked: ThinkingBudget) -> ReasoningBudget:
        """Before the first output."""
        return cls(asked, in_reasoning=asked.start_token_ids is None)

    def accept(self, token: int) -> None:
        """Take in the next output."""
        self._num_outputs += 1
        if self.finished:
            return
        mark = self._next_marker
        self._num_matched = match_length(mark, self._num_matched, token)
        self._num_reasoning += self.in_reasoning
        if self._num_matched < len(mark):
            return
        self._num_matched = 0
        if self.in_reasoning:
            self._num_reasoning -= len(mark)
            self.finished = self.params.start_token_ids is None
        self.in_reasoning = not self.in_reasoning

    def may_force(self, outputs: int) -> bool:
        """Whether a token may have to be forced behind so many outputs, some perhaps not seen."""
        if self.finished:
            return False
        unseen = outputs - self._num_outputs
        if not self.in_reasoning:
            unseen -= len(self._next_marker) - self._num_matched
        return unseen >= 0 and self._num_reasoning + unseen >= self.params.max_tokens

    @property
    def forced_token(self) -> int | None:
        """The token that must come next, all outputs having been taken in; None: any may."""
        if self.finished or not self.in_reasoning or self._num_reasoning < self.params.max_tokens:
            return None
        return self.params.end_token_ids[self._num_matched]

    @property
    def _next_marker(self) -> TokenSequence:
        """The one to come."""
        return self.params.end_token_ids if self.in_reasoning else self.params.start_token_ids or ()


def match_length(mark: TokenSequence, before: int, token: int) -> int:
    """How much of the mark the outputs end with, one more token after `before` of it."""
    if not before:
        return int(mark[0] == token)
    tail = (*mark[:before], token)
    while tail and tail != mark[: len(tail)]:
        tail = tail[1:]
    return len(tail)
