"""A function in place of a model: tests of the engine and load tests of the server.

`next_token(tokens)` sees a sequence's tokens so far and says the next. With steps in flight a
token may still be UNKNOWN to the scheduler; this executor remembers its own, as a runner does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from quire.core.types import UNKNOWN, StepPlan, StepResult

NextToken = Callable[[Seq[int]], int]


class _CompletedStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Executor:
    """Obeys plans by calling a function for each row that samples."""

    def __init__(self, next_token: NextToken) -> None:
        self._next_token = next_token
        self._tokens: dict[int, list[int]] = {}  # slot -> tokens as far as this side knows them
        self.steps = 0

    def submit(self, plan: StepPlan) -> _CompletedStep:
        self.steps += 1
        for seq in plan.joins:
            self._tokens[seq.slot] = list(seq.tokens)
        said: list[tuple[int, ...]] = []
        for row in plan.rows:
            if not row.samples:
                said.append(())
                continue
            tokens = self._tokens[row.seq.slot]
            assert UNKNOWN not in tokens[: row.start + row.count]
            del tokens[row.start + row.count :]
            tokens.append(self._next_token(tokens))
            said.append((tokens[-1],))
        return _CompletedStep(StepResult(said))

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self._next_token)]

    def release_kv_memory(self) -> None:
        """There is none."""

    def recover(self) -> None:
        """Nothing can be half done."""

    def shutdown(self) -> None:
        self._tokens.clear()
