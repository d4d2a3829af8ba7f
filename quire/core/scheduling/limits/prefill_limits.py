"""Prefill limits: bound the chunks of prompts in a step, and the number of partial ones.

A row is partial when it does not reach the end of what its sequence has to compute. Decoding rows
never are, so none of these limits applies to them.
"""

from __future__ import annotations

from quire.core.media.item_rows import least_tokens
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.types import Sequence


class PrefillChunkLimit(StepBudget):
    """Bounds a row to `most` tokens, unless it is alone (long_prefill_token_threshold)."""

    def __init__(self, most: int) -> None:
        assert most > 0, most
        self.max_tokens = most
        self._alone = False

    def begin_step(self, sequences: int) -> None:
        self._alone = sequences <= 1

    def allow(self, seq: Sequence, want: int) -> int:
        if self._alone or want <= self.max_tokens:
            return want
        least = least_tokens(seq) if seq.request.media else 1
        return min(want, max(self.max_tokens, least))

    def free_decode_rows(self) -> int:
        return NO_BOUND


class PartialPrefillLimit(StepBudget):
    """Bounds the partial rows in a step (max_num_partial_prefills). Comes after TokenBudget."""

    allows_overtaking = True

    def __init__(self, most: int) -> None:
        assert most > 0, most
        self.max_rows = most
        self.left = most

    def begin_step(self, sequences: int) -> None:
        self.left = self.max_rows

    def is_counted(self, seq: Sequence, n: int) -> bool:
        """Whether a row of n tokens counts as partial."""
        return n < seq.pending

    def allow(self, seq: Sequence, want: int) -> int:
        return 0 if self.left <= 0 and self.is_counted(seq, want) else want

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= self.is_counted(seq, n)

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += self.is_counted(seq, n)

    def free_decode_rows(self) -> int:
        return NO_BOUND


class LongPrefillLimit(PartialPrefillLimit):
    """Bounds the partial rows of long prompts in a step (max_long_partial_prefills).

    A prompt is long with more than `threshold` tokens. Shorter ones behind it may overtake.
    """

    def __init__(self, most: int, threshold: int) -> None:
        super().__init__(most)
        self.threshold = threshold

    def is_counted(self, seq: Sequence, n: int) -> bool:
        return seq.prompt_len > self.threshold and n < seq.pending
