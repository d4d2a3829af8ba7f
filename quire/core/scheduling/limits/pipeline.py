"""Pipeline limit: gives pipeline stages equally many decoding sequences and parts of prompts.

A pipeline is full while each of its stages runs another step: so the running sequences are divided
into as many groups as there are stages, and a sequence has a row in one step of so many. Its next
row may be planned before the host has its token, which the last stage hands to the first. Each
group reads all weights, but on other stages at the same time, so a group per stage is never slower
than one for all. Rows that need their token on the host, for a mask or for drafts, wait for it.

Chunks of a prompt need no token, so they follow each other through the stages. Prompts that end
together would put all sequences in one step and leave the other steps empty: so a step takes an
equal share of them. A prompt that is in one step alone would make the other stages wait for the
stage that computes it, on each of them in turn: so it is divided over as many steps as stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import UNKNOWN, Sequence, SequenceState


class PipelineLimit(StepBudget):
    """left = ceil(running sequences / groups) - rows of one token taken in this step."""

    allows_overtaking = True
    least_share: ClassVar[int] = 256
    """Tokens of a prompt that a step takes at least: with fewer, reading weights again would cost
    more than waiting."""

    def __init__(
        self,
        stages: int,
        queue: WaitingQueue,
        serialize_steps: Callable[[], bool],
        *,
        divides: bool = True,
        sends_tokens: bool = True,
    ) -> None:
        """stages: that steps in flight can fill. queue: sequences that wait. serialize_steps:
        whether each step must be over before the next is planned, so that there is nothing to
        share. divides: whether a prompt may be computed over several steps. sends_tokens: whether
        the first stage gets tokens from the last one, and not from the host."""
        self._stages, self._queue, self._serialize_steps = stages, queue, serialize_steps
        self._divides, self._parts = divides, 1  # parts of a prompt
        self._sends_tokens, self._groups = sends_tokens, 1
        self._taken: deque[set[Sequence]] = deque(maxlen=stages)
        """Sequences with a row in the last steps, of this one last."""
        self.left = 0

    def begin_step(self, sequences: int) -> None:
        stages, running = 1 if self._serialize_steps() else self._stages, sequences - len(self._queue)
        self._parts = stages if self._divides else 1
        self._groups = max(1, min(stages, running))
        self._taken.append(set())
        self.left = -(-running // stages)

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.tokens[-1] == UNKNOWN and not self._may_follow(seq):
            return 0
        if not _is_decoding(seq):
            return min(want, self._share(seq))
        waits = seq.state is SequenceState.WAITING  # it was not counted at the begin of the step
        return want if self.left > 0 or waits else 0

    def _may_follow(self, seq: Sequence) -> bool:
        """Whether a sequence may have a row whose token a step in flight has yet to yield: the one
        of its group before, which must not wait for others of its own sequences."""
        request = seq.request
        if not self._sends_tokens or seq.tokens[-2:] == [UNKNOWN, UNKNOWN]:
            return False
        if request.constraint is not None or request.thinking is not None:
            return False  # its mask is made on the host
        if len(seq.tokens) >= seq.plain_len:
            return False  # it may have drafts
        last = len(self._taken) - 1
        return not any(seq in self._taken[last - i] for i in range(1, min(self._groups, last + 1)))

    def _share(self, seq: Sequence) -> int:
        """The most tokens of a prompt in one step. What must not be divided is left whole."""
        if self._parts == 1 or seq.request.media or seq.request.bidirectional_tokens:
            return NO_BOUND
        return max(self.least_share, -(-(len(seq.tokens) - seq.cached) // self._parts))

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= _is_decoding(seq)
        self._taken[-1].add(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += _is_decoding(seq)
        self._taken[-1].discard(seq)


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len
