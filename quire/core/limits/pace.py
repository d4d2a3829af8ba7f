"""Prompts leave room for those who decode: a step of both takes no longer than a target.

How many prompt tokens that are is learnt from each step that landed: so many more or fewer as it
was quicker or slower than the target. A step has fixed costs, so this errs on the small side and
comes nearer with each step; it needs no model of the device, and forgets a stall in a few steps.
Where nobody decodes, prompts get all there is: nobody waits for a token then.
"""

from __future__ import annotations

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.types import Sequence

LEAST = 64
"""Prompt tokens a step may always have, whatever the target: prompts must get on too."""
FULL = 0.4
"""Of what is allowed, so much makes a step full: rounding may take more than half."""


class Pace(Limit):
    """left = what the target allows - prompt tokens taken in this step, if somebody decodes."""

    def __init__(self, target_s: float) -> None:
        assert target_s > 0, target_s
        self.target_s = target_s
        self.most = float(NO_BOUND)  # prompt tokens of a step
        self.left = NO_BOUND
        self.decoding = 0  # rows of this step
        self.decoded = 0  # rows of the step before: those of this one may come late in it

    def begin(self, sequences: int) -> None:
        self.decoded, self.decoding = self.decoding, 0
        self.left = NO_BOUND
        if self.most < NO_BOUND:
            self.left = max(LEAST, _even(int(self.most) + self.decoded) - self.decoded)

    def allow(self, seq: Sequence, want: int) -> int:
        if _decodes(seq) or not (self.decoding or self.decoded):
            return want
        return max(0, min(want, self.left))

    def take(self, seq: Sequence, n: int) -> None:
        if _decodes(seq):
            self.decoding += 1
        else:
            self.left -= n

    def undo(self, seq: Sequence, n: int) -> None:
        if _decodes(seq):
            self.decoding -= 1
        else:
            self.left += n

    def slack(self) -> int:
        return NO_BOUND

    def take_ones(self, rows: int) -> None:
        self.decoding += rows

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens < LEAST or seconds <= 0:
            return
        fits = max(prompt_tokens * self.target_s / seconds, LEAST)
        if fits < prompt_tokens or prompt_tokens >= FULL * self.most:
            self.most = fits
        else:
            self.most = max(self.most, fits)


def _decodes(seq: Sequence) -> bool:
    """Whether the row is of a next token, not of a prompt or of what was preempted."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len


def _even(tokens: int) -> int:
    """So many or somewhat fewer: matrix products work in tiles, and pay for the last ones in full.

    Not by much: a step that got a third less would not show that the third had fitted.
    """
    grain = 256 if tokens >= 1024 else 128 if tokens >= 512 else 1
    return tokens - tokens % grain
