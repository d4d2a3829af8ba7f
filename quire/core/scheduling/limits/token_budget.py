"""Token budget: bounds the tokens in one step (max_num_batched_tokens)."""

from __future__ import annotations

from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget
from quire.core.types import Request, Sequence, SequenceState
from quire.errors import TooLong


class TokenBudget(StepBudget):
    """left = per_step - tokens taken in this step, never negative."""

    def __init__(self, per_step: int) -> None:
        assert per_step > 0, per_step
        self.per_step = per_step
        self.left = per_step

    def begin_step(self, sequences: int) -> None:
        self.left = self.per_step

    def allow(self, seq: Sequence, want: int) -> int:
        return min(want, self.left)

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= n

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += n

    def full(self) -> bool:
        return self.left <= 0

    def free_decode_rows(self) -> int:
        return self.left

    def take_decode_rows(self, rows: int) -> None:
        self.left -= rows


class WholePromptLimit(StepBudget, Admission):
    """Computes a prompt whole or not yet (enable_chunked_prefill=False). Comes after TokenBudget.

    A preempted sequence recomputes its outputs too, and one resumed from another engine has outputs
    already. With those it may exceed the budget, so they may be computed in chunks.
    """

    def __init__(self, per_step: int) -> None:
        assert per_step > 0, per_step
        self.per_step = per_step

    def check_request(self, request: Request) -> None:
        if len(request.prompt) > self.per_step:
            raise TooLong(
                f"the prompt has {len(request.prompt)} tokens, and with chunked prefill off a step "
                f"takes at most {self.per_step}; shorten the prompt, raise max_num_batched_tokens "
                "or turn enable_chunked_prefill on",
                param="prompt",
            )

    def allow(self, seq: Sequence, want: int) -> int:
        started = seq.state is SequenceState.RUNNING or len(seq.tokens) > seq.prompt_len
        return want if started or want == seq.pending else 0

    def free_decode_rows(self) -> int:
        return NO_BOUND
