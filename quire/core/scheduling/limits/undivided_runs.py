"""Undivided runs: a step computes a run of tokens that attend to each other whole, or not yet.

Tokens of an image may attend to those after them in their run. Their keys and values are right only
if all of them are computed together.
"""

from __future__ import annotations

from quire.core.media.item_rows import longest_undivided, start_of_divided_run
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget
from quire.core.types import Request, Sequence
from quire.errors import TooLong


class UndividedRunLimit(StepBudget, Admission):
    """per_step: tokens of a step. Comes after what bounds tokens.

    No sequence that waits overtakes one that waits for a step with enough tokens: it would take
    tokens of each step from then on.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step

    def check_request(self, request: Request) -> None:
        longest = longest_undivided(request)
        if longest > self._per_step:
            raise TooLong(
                f"the prompt has {longest} tokens that attend to each other in both directions, "
                f"and a step computes at most {self._per_step}: raise max_num_batched_tokens",
                param="prompt",
            )

    def allow(self, seq: Sequence, want: int) -> int:
        if not seq.request.media or seq.planned >= seq.prompt_len:
            return want
        start = start_of_divided_run(seq.request, seq.planned + want)
        return want if start is None else max(start - seq.planned, 0)

    def free_decode_rows(self) -> int:
        return NO_BOUND
