"""Shortest prompt first: shares the prompt tokens of a step, with a quarter for the oldest prompt.

Without it the first running prompt takes all prompt tokens of a step, and a prompt of ten tokens
waits until a book-length prompt ends. Here each prompt leaves tokens for shorter ones: running, or
among the first that wait. The oldest unfinished prompt keeps a quarter of the step, so that none
starves.

Tokens left for waiting prompts are lost if those do not start (no slot, no blocks). After a step in
which none started, none are left for a while, and for longer each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from quire.core.media.item_rows import least_tokens
from quire.core.scheduling.limits.base import NO_BOUND, StepBudget
from quire.core.scheduling.order.base import WaitingQueue
from quire.core.types import Row, Sequence, SequenceState

LOOKAHEAD = 8
"""Number of waiting sequences that are considered."""
OLDEST_SHARE = 0.25
MAX_BACKOFF = 31


class ShortestPromptFirst(StepBudget):
    """queue: of waiting sequences. prompt_tokens_left: returns the prompt tokens that earlier
    limits leave.

    Comes after those limits.
    """

    def __init__(self, queue: WaitingQueue, prompt_tokens_left: Callable[[], int]) -> None:
        self._queue = queue
        self._prompt_tokens_left = prompt_tokens_left
        self._partial_prompts: dict[Sequence, None] = {}  # prompts that come in parts, oldest first
        self._queue_heads: list[Sequence] = []  # waiting sequences that tokens were left for
        self._oldest: Sequence | None = None
        self._demands: dict[Sequence, int] = {}  # tokens that sequences without any yet could use
        self._oldest_reserve = 0  # for the oldest
        self._backoff_steps = self._backoff_left = 0

    def begin_step(self, sequences: int) -> None:
        self._partial_prompts = {
            seq: None
            for seq in self._partial_prompts
            if seq.state is SequenceState.RUNNING and _is_prefilling(seq)
        }
        self._update_backoff()
        first = [] if self._backoff_left or not len(self._queue) else islice(self._queue, LOOKAHEAD)
        self._queue_heads = [seq for seq in first if _is_prefilling(seq)]
        self._demands = {}
        if len(self._partial_prompts) + len(self._queue_heads) > 1:
            self._demands = {
                seq: seq.pending for seq in (*self._partial_prompts, *self._queue_heads)
            }
        self._oldest = next(iter(self._demands), None)
        self._oldest_reserve = int(max(self._prompt_tokens_left(), 0) * OLDEST_SHARE)

    def allow(self, seq: Sequence, want: int) -> int:
        if not self._demands or want <= 1 or not _is_prefilling(seq):
            return want
        own = seq.pending
        shorter = sum([n for one, n in self._demands.items() if n < own and _may_join(one, seq)])
        left = self._prompt_tokens_left() - shorter
        if seq is self._oldest:
            left = max(left, self._oldest_reserve, 1)
        elif self._oldest in self._demands and self._demands[self._oldest] > own:
            left -= self._oldest_reserve
        if left > 0 and seq.request.media:
            left = max(left, least_tokens(seq))
        return max(min(want, left), 0)

    def take(self, seq: Sequence, n: int) -> None:
        self._demands.pop(seq, None)
        if n < seq.pending:
            self._partial_prompts[seq] = None

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        """Forget the demands of prompts of which the last token came this way."""
        if self._demands:
            for row in rows:
                self._demands.pop(row.seq, None)

    def undo(self, seq: Sequence, n: int) -> None:
        if seq in self._partial_prompts or seq in self._queue_heads:
            self._demands[seq] = seq.pending

    def free_decode_rows(self) -> int:
        return NO_BOUND

    def _update_backoff(self) -> None:
        """Back off if no sequence that tokens were left for started in the step before."""
        if self._backoff_left:
            self._backoff_left -= 1
        elif self._queue_heads and self._partial_prompts:
            came = any(seq.state is not SequenceState.WAITING for seq in self._queue_heads)
            self._backoff_steps = 0 if came else min(2 * self._backoff_steps + 1, MAX_BACKOFF)
            self._backoff_left = self._backoff_steps


def _may_join(one: Sequence, seq: Sequence) -> bool:
    """Whether a sequence runs on the data-parallel rank of another, or may start there."""
    return one.dp_rank == seq.dp_rank or one.state is SequenceState.WAITING


def _is_prefilling(seq: Sequence) -> bool:
    """Whether it has more to compute than the next token."""
    return seq.pending > 1 or seq.planned < seq.prompt_len
