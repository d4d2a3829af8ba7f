"""Encoder budget: bounds the tokens of the sources that one step encodes.

A source is encoded whole, by the step that starts the first sequence that needs it.
"""

from __future__ import annotations

from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget
from quire.core.types import Request, Sequence
from quire.errors import TooLong


class EncoderBudget(StepBudget, Admission):
    """per_step: at least max_len, so that every source that is accepted fits into some step."""

    allows_overtaking = True  # by sequences whose source is known already

    def __init__(self, per_step: int, max_len: int) -> None:
        assert per_step >= max_len > 0, (per_step, max_len)
        self._per_step = per_step
        self._max_len = max_len
        self._left = per_step
        self._before = self._latest = -1  # latest step that encodes, before this step and of all

    def check_request(self, request: Request) -> None:
        if len(request.encoder_prompt) > self._max_len:
            raise TooLong(
                f"the encoder prompt has {len(request.encoder_prompt)} tokens; at most "
                f"{self._max_len} are allowed",
                param="encoder_prompt",
            )

    def begin_step(self, sequences: int) -> None:
        self._left = self._per_step
        self._before = self._latest

    def allow(self, seq: Sequence, want: int) -> int:
        source = seq.request.encoder_prompt
        return want if not source or seq.cross_table or len(source) <= self._left else 0

    def take(self, seq: Sequence, n: int) -> None:
        if seq.encoder_step > self._before:  # it starts with this step
            self._left -= len(seq.request.encoder_prompt)
            self._latest = seq.encoder_step

    def undo(self, seq: Sequence, n: int) -> None:
        if seq.encoder_step > self._before:
            self._left += len(seq.request.encoder_prompt)

    def free_decode_rows(self) -> int:
        return NO_BOUND
