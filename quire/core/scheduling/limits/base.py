"""Contracts that a scheduler works with: StepBudget, Admission, StepListener.

A feature that constrains scheduling is a class in a file of its own, which implements one or
several of them. The scheduler takes a list of each and names no feature. The order of budgets
matters: each sees what those before it left of the tokens asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from typing import TypedDict

from quire.core.scheduler_stats import EngineLoad
from quire.core.scheduling.waiting import ResourceProvider
from quire.core.types import Request, Row, Sequence

NO_BOUND = sys.maxsize


class StepBudget:
    """Bounds how many tokens of which sequences a step computes.

    allow() is pure and 0 <= allow(seq, want) <= want; take() and undo() are exact opposites, so
    preemption needs no code here. All three are called while seq.planned does not yet count the
    tokens in question. `want` may exceed seq.pending: what is beyond are drafts.
    """

    allows_overtaking: bool = False
    """Whether sequences that wait behind a refused one may start before it."""

    def begin_step(self, sequences: int) -> None:
        """Start a step. sequences: how many run or wait."""

    def postponed(self) -> Set[Sequence]:
        """Return running sequences that allow() refuses in this step, so that it need not be asked.
        Any of them may be left out."""
        return frozenset()

    def may_start(self, seq: Sequence) -> bool:
        """Whether a sequence without blocks may start, as far as it is known without them.

        It saves the search for cached blocks of sequences that allow() has refused.
        """
        return True

    def allow(self, seq: Sequence, want: int) -> int:
        """How many of `want` tokens the sequence may compute in this step."""
        return want

    def take(self, seq: Sequence, n: int) -> None:
        """Count n tokens of the sequence, which allow() granted."""

    def undo(self, seq: Sequence, n: int) -> None:
        """Revert take(seq, n)."""

    def full(self) -> bool:
        """Whether no further row of any sequence would be granted now."""
        return False

    def plan_part(self) -> object | None:
        """Return what the plan of this step must carry to the workers, of a type of its own, or
        None."""
        return None

    def free_decode_rows(self) -> int:
        """A lower bound of the rows of one token that would be granted now, to any sequences that
        run and are not postponed, whose length is below plain_len.

        It lets a step of plain decoding pass without a call per sequence; 0 is always correct.
        """
        return 0

    def take_decode_rows(self, rows: int) -> None:
        """take() for `rows` rows of one token each, within free_decode_rows()."""

    def take_each_decode_row(self, rows: Iterable[Row]) -> None:
        """The same, for a budget that counts by sequence."""


class Admission:
    """Accepts or refuses requests, and follows those it accepted to their end."""

    @property
    def load(self) -> EngineLoad | None:
        """What is to be done of the requests that it follows; None: it does not count that."""
        return None

    def check_batch(self, requests: Seq[Request]) -> None:
        """Raise RequestError or Overloaded to refuse requests of one tenant that come together."""

    def check_request(self, request: Request) -> None:
        """Raise RequestError to refuse the request."""

    def add_request(self, request: Request) -> None:
        """Every admission has accepted the request. Called once."""

    def remove_request(self, request: Request) -> None:
        """All sequences of an added request have ended, in any state."""

    def stats(self) -> object | None:
        """Return one of the types in quire.core.snapshot for a snapshot of the engine, or None."""
        return None


class StepListener:
    """Observes the outcomes of steps."""

    serialize_steps: bool = False
    """Whether a step must be over before the next is planned."""

    unattributed_failures: int = 0
    """Failed steps, with their trials, after which no request was to blame."""

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step with `prompt_tokens` was applied, `seconds` after the one before."""

    def observe_device_doubt(self) -> None:
        """A step raised: what it has written to the device is unknown."""

    def observe_memory_release(self) -> None:
        """What is on the device beside the weights was given up."""

    def observe_step_failure(self, rows: Seq[Sequence]) -> str | None:
        """A step of these sequences raised; all running ones are about to be recomputed.

        Returns the id of the request to blame, if that is known.
        """
        return None


class Contracts(TypedDict):
    """Keyword arguments of a Scheduler."""

    budgets: list[StepBudget]
    admissions: list[Admission]
    listeners: list[StepListener]
    resources: list[ResourceProvider]


def by_contract(parts: Iterable[object]) -> Contracts:
    """Sort parts by the contracts they implement, in their order. One part may be in several."""
    parts = list(parts)
    return {
        "budgets": [one for one in parts if isinstance(one, StepBudget)],
        "admissions": [one for one in parts if isinstance(one, Admission)],
        "listeners": [one for one in parts if isinstance(one, StepListener)],
        "resources": [one for one in parts if isinstance(one, ResourceProvider)],
    }
