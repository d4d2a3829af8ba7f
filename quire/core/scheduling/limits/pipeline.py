"""Pipeline limit: gives steps in flight equally many decoding sequences and parts of prompts.

A pipeline is full while each of its stages runs another step. A sequence whose next token is still
to come from a step in flight has no row until that step was applied. Chunks of a prompt need no
token, so they follow each other through the stages. Prompts that end together would put all
sequences in one step and leave the other steps empty: so a step takes an equal share of them. A
prompt that is in one step alone would make the other stages wait for the stage that computes it,
on each of them in turn: so it is divided over as many steps as are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import UNKNOWN, Sequence, SequenceState


class PipelineLimit(StepBudget):
    """left = ceil(running sequences / steps in flight) - rows of one token taken in this step."""

    allows_overtaking = True
    least_share: ClassVar[int] = 256
    """Tokens of a prompt that a step takes at least: with fewer, reading weights again would cost
    more than waiting."""

    def __init__(
        self,
        steps: int,
        queue: WaitingQueue,
        serialize_steps: Callable[[], bool],
        *,
        divides: bool = True,
    ) -> None:
        """steps: in flight. queue: sequences that wait. serialize_steps: whether each step must be
        over before the next is planned, so that there is nothing to share. divides: whether a
        prompt may be computed over several steps."""
        self._steps, self._queue, self._serialize_steps = steps, queue, serialize_steps
        self._divides, self._parts = divides, 1  # parts of a prompt
        self.left = 0

    def begin_step(self, sequences: int) -> None:
        steps = 1 if self._serialize_steps() else self._steps
        self._parts = steps if self._divides else 1
        self.left = -(-(sequences - len(self._queue)) // steps)

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.tokens[-1] == UNKNOWN:
            return 0
        if not _is_decoding(seq):
            return min(want, self._share(seq))
        waits = seq.state is SequenceState.WAITING  # it was not counted at the begin of the step
        return want if self.left > 0 or waits else 0

    def _share(self, seq: Sequence) -> int:
        """The most tokens of a prompt in one step. What must not be divided is left whole."""
        if self._parts == 1 or seq.request.media or seq.request.bidirectional_tokens:
            return NO_BOUND
        return max(self.least_share, -(-(len(seq.tokens) - seq.cached) // self._parts))

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= _is_decoding(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += _is_decoding(seq)


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len
