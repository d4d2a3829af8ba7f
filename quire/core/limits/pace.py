"""Prompts leave room for those who decode: a step of both takes no longer than a target.

    seconds of a step  =  seconds of a step that only decodes  +  prompt tokens x seconds of each

Both are learnt from steps as they land, so nothing needs to be known of the device. Where nobody
decodes, prompts get all there is: nobody waits for a next token then.
"""

from __future__ import annotations

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.types import Sequence

LEAST = 64
"""Prompt tokens a step may always have, whatever the target: prompts must get on too."""
WEIGHT = 0.5
"""Of the newest step in what is learnt."""
JUMP = 2.0
"""A step counts as at most this many times slower than learnt: one that stalls teaches little."""


class Pace(Limit):
    """left = what the target allows - prompt tokens taken in this step, if somebody decodes."""

    def __init__(self, target_s: float) -> None:
        assert target_s > 0, target_s
        self.target_s = target_s
        self.decode_s = 0.0
        self.token_s = 0.0  # 0: not known yet
        self.left = NO_BOUND
        self.decoding = 0  # rows of this step
        self.decoded = 0  # rows of the step before: those of this one may come late in it

    def begin(self, sequences: int) -> None:
        self.decoded, self.decoding = self.decoding, 0
        self.left = NO_BOUND
        if self.token_s:
            tokens = int((self.target_s - self.decode_s) / self.token_s) + self.decoded
            self.left = max(LEAST, _even(tokens) - self.decoded)

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
        if not prompt_tokens:
            self.decode_s = _nearer(self.decode_s, seconds)
        elif prompt_tokens >= LEAST:
            each = max(seconds - self.decode_s, 0.1 * seconds) / prompt_tokens
            self.token_s = _nearer(self.token_s, each)


def _decodes(seq: Sequence) -> bool:
    """Whether the row is of a next token, not of a prompt or of what was preempted."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len


def _even(tokens: int) -> int:
    """So many or somewhat fewer: matrix products work in tiles, and pay for the last ones in full.

    1,024 rows are about one round of tiles for all the multiprocessors of a large GPU.
    """
    for grain in (1024, 128):
        if tokens >= grain:
            return tokens - tokens % grain
    return tokens


def _nearer(known: float, seen: float) -> float:
    return known + WEIGHT * (min(seen, JUMP * known) - known) if known else seen
