"""Pipeline limit: gives the steps in flight disjoint decoding sequences, equally many each.

A pipeline is full while each of its stages runs another step. A sequence whose next token is still
to come from a step in flight has no row until that step was applied. Chunks of a prompt need no
token, so they follow each other through the stages. Prompts that end together would put all
sequences in one step and leave the other steps empty: so a step takes an equal share of them.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.scheduling.limits.base import StepBudget
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import UNKNOWN, Sequence, SequenceState


class PipelineLimit(StepBudget):
    """left = ceil(running sequences / steps in flight) - rows of one token taken in this step."""

    allows_overtaking = True

    def __init__(
        self, steps: int, queue: WaitingQueue, serialize_steps: Callable[[], bool]
    ) -> None:
        """steps: in flight. queue: sequences that wait. serialize_steps: whether each step must be
        over before the next is planned, so that there is nothing to share."""
        self._steps, self._queue, self._serialize_steps = steps, queue, serialize_steps
        self.left = 0

    def begin_step(self, sequences: int) -> None:
        steps = 1 if self._serialize_steps() else self._steps
        self.left = -(-(sequences - len(self._queue)) // steps)

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.tokens[-1] == UNKNOWN:
            return 0
        waits = seq.state is SequenceState.WAITING  # it was not counted at the begin of the step
        return want if self.left > 0 or waits or not _is_decoding(seq) else 0

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= _is_decoding(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += _is_decoding(seq)


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len
