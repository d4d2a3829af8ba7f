"""Fake executor: calls a function in place of a model, for tests of engine and server.

`next_token(tokens)` gets a sequence's tokens so far and returns the next. With steps in flight a
token may still be UNKNOWN to the scheduler; this executor keeps its own copy, as a runner does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from quire.core.snapshot import LateWorkCounts
from quire.core.types import UNKNOWN, Pooled, Row, StepPlan, StepResult, Wants
from quire.kernels.framework import late_work

NextToken = Callable[[Seq[int]], int]


class _CompletedStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Executor:
    """Executes plans by calling a function for each row that samples."""

    def __init__(self, next_token: NextToken) -> None:
        self._next_token = next_token
        self._tokens: dict[int, list[int]] = {}  # slot -> tokens as far as this side has them
        self.steps = 0

    def submit(self, plan: StepPlan) -> _CompletedStep:
        self.steps += 1
        for seq in plan.joins:
            self._tokens[seq.slot] = list(seq.tokens)
        generated = [self._generate(row) if row.wants is Wants.TOKEN else () for row in plan.rows]
        pooled = {
            i: self._pool(row) for i, row in enumerate(plan.rows) if row.wants is Wants.POOLED
        }
        return _CompletedStep(StepResult(generated, pooled=pooled))

    def _pool(self, row: Row) -> Pooled:
        """Return the ids of the prompt's tokens as a vector."""
        tokens = self._tokens[row.seq.slot]
        return Pooled((len(tokens),), array("f", tokens).tobytes())

    def _generate(self, row: Row) -> tuple[int, ...]:
        """Return the next tokens: the drafts that agree with the function, and one more."""
        tokens, known = self._tokens[row.seq.slot], row.start + row.count - row.drafts
        assert UNKNOWN not in tokens[:known]
        del tokens[known:]
        for draft in (*row.seq.drafts[: row.drafts], None):
            tokens.append(self._next_token(tokens))
            if tokens[-1] != draft:
                break
        return tuple(tokens[known:])

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self._next_token)]

    def late_work(self) -> LateWorkCounts:
        return late_work.counts()

    def release_kv_memory(self) -> None:
        """Do nothing: there is no KV memory."""

    def recover(self) -> None:
        """Do nothing: no state can be inconsistent."""

    def set_failure_callback(self, callback: Callable[[], None]) -> None:
        """Do nothing: there is no other process that can end."""

    def shutdown(self) -> None:
        self._tokens.clear()
