"""Reasons for a sequence to get fewer tokens than it wants this step.

A feature that constrains scheduling is a Limit in a file of its own. The scheduler knows the
protocol and no feature's name; undo() is why preemption needs no feature code either. Order
matters: a limit sees what those before it left of the wish.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.core.types import Request, Sequence
from quire.errors import EngineError, RequestError

NO_BOUND = sys.maxsize


class WaitResult(NamedTuple):
    """A request need not be kept out of the queue any longer."""

    request_id: str
    error: RequestError | EngineError | None = None
    """Why it can never run."""


class Limit:
    """allow() is pure and 0 <= allow(seq, want) <= want; take() and undo() are exact opposites.

    All three are called while seq.planned does not yet count the tokens in question.
    """

    allows_overtaking: bool = False
    """Whether sequences that wait behind one it refuses may go before that one."""

    def check_request(self, request: Request) -> None:
        """Raise TooLong if the request could never run under this limit."""

    def add_request(self, request: Request) -> bool:
        """Whether it must stay out of the queue until verdicts() names it.

        Called once, after every limit has accepted it; what it needs from elsewhere is sent for.
        """
        return False

    def wait_results(self) -> Iterable[WaitResult]:
        """Who need not be kept out any longer; each is named once. Asked while any is kept out."""
        return ()

    @property
    def has_wait_results(self) -> bool:
        """Whether verdicts() would name somebody."""
        return False

    def set_ready_callback(self, ring: Callable[[], None]) -> None:
        """Have ring() called, by any thread, whenever `decided` may have become true."""

    def remove_request(self, request: Request) -> None:
        """All sequences of a request that was accepted have ended, wherever they were."""

    def begin_step(self, sequences: int) -> None:
        """Start a step. sequences: how many run or wait."""

    def allow(self, seq: Sequence, want: int) -> int:
        """How many of `want` tokens the sequence may compute in this step."""
        return want

    def take(self, seq: Sequence, n: int) -> None:
        """Count n tokens of the sequence, which allow() granted."""

    def undo(self, seq: Sequence, n: int) -> None:
        """Forget that take(seq, n) happened."""

    def full(self) -> bool:
        """Whether no further row of any sequence would be granted now."""
        return False

    def free_decode_rows(self) -> int:
        """At least so many further rows of one token would be granted now, whoever asks.

        What lets a step of plain decoding pass without a call per sequence; 0 is always true.
        """
        return 0

    def take_decode_rows(self, rows: int) -> None:
        """take() for so many rows of the last token each; called only within slack()."""

    serialize_steps: bool = False
    """Whether a step is to be over before the next is planned."""

    unattributed_failures: int = 0
    """Inquiries into steps that raised which found nobody to blame."""

    def observe_step_failure(self, rows: Seq[Sequence]) -> str | None:
        """A step of these raised; they are about to go back to the queue, to be computed anew.

        The id of the request to blame, if this limit knows.
        """
        return None

    def stats(self) -> object | None:
        """What a snapshot has of it: one of the types in quire.core.snapshot, and found by that."""
        return None

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long, from the one before it."""
