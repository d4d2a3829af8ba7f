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
from collections.abc import Callable, Iterable, Set
from typing import ClassVar

from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import UNKNOWN, Row, Sequence, SequenceState


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
        """Sequences that the last steps sample, those of this one last."""
        self._masked: set[Sequence] = set()
        """Sequences with a mask and a row in flight, whose token the host lacks."""
        self.left = 0

    def begin_step(self, sequences: int) -> None:
        running, stages = sequences - len(self._queue), self._stages
        if self._serialize_steps():
            stages = 1
        self._parts = stages if self._divides else 1
        self._groups = max(1, min(stages, running))
        self._taken.append(set())
        self._masked = {seq for seq in self._masked if seq.tokens[-1] == UNKNOWN}
        self.left = -(-running // stages)

    def postponed(self) -> Set[Sequence]:
        others = [seq for taken in self._other_groups() for seq in taken]
        found = self._masked.union([seq for seq in others if seq.tokens[-1] == UNKNOWN])
        if self._groups < self._stages:  # else a step in flight has been applied between the two
            found.update([seq for taken in self._taken for seq in taken if _has_two_rows(seq)])
        return found

    def allow(self, seq: Sequence, want: int) -> int:
        if seq.tokens[-1] == UNKNOWN and not self._may_follow(seq):
            return 0
        if not _is_decoding(seq):
            return min(want, self._share(seq))
        waits = seq.state is SequenceState.WAITING  # it was not counted at the begin of the step
        return want if self.left > 0 or waits else 0

    def _may_follow(self, seq: Sequence) -> bool:
        """Whether a sequence may have a row that reads a token which the host may lack: the row
        behind that of its group before."""
        if not self._sends_tokens or _has_mask(seq) or len(seq.tokens) >= seq.plain_len:
            return False  # a mask is made on the host, and drafts are verified there
        return not _has_two_rows(seq) and not any(seq in taken for taken in self._other_groups())

    def _other_groups(self) -> list[set[Sequence]]:
        """Return the sequences of the steps between the one before of this group and this one."""
        return [*self._taken][-self._groups : -1]

    def _share(self, seq: Sequence) -> int:
        """The most tokens of a prompt in one step. What must not be divided is left whole."""
        if self._parts == 1 or seq.request.media or seq.request.bidirectional_tokens:
            return NO_BOUND
        return max(self.least_share, -(-(len(seq.tokens) - seq.cached) // self._parts))

    def take(self, seq: Sequence, n: int) -> None:
        self.left -= _is_decoding(seq)
        if n >= seq.pending:
            self._taken[-1].add(seq)
            if _has_mask(seq):
                self._masked.add(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self.left += _is_decoding(seq)
        self._taken[-1].discard(seq)
        self._masked.discard(seq)

    def free_decode_rows(self) -> int:
        return max(0, self.left) if self._sends_tokens else 0

    def take_decode_rows(self, rows: int) -> None:
        self.left -= rows

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        taken = [row.seq for row in rows]
        self._taken[-1].update(taken)
        self._masked.update([seq for seq in taken if _has_mask(seq)])


def _has_mask(seq: Sequence) -> bool:
    """Whether the host makes a mask for each of its tokens, and needs those before."""
    return seq.request.constraint is not None or seq.request.thinking is not None


def _has_two_rows(seq: Sequence) -> bool:
    """Whether two steps in flight sample the sequence: a third would be wasted if it ended."""
    return seq.tokens[-2:] == [UNKNOWN, UNKNOWN]


def _is_decoding(seq: Sequence) -> bool:
    """Whether the row computes a next token, not a prompt or preempted tokens."""
    return seq.pending == 1 and seq.planned >= seq.prompt_len
