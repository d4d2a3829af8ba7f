"""Pooling part: returns the hidden state of the last token, for rows that want a pooled result.

The one kind of pooling is "last": a causal model has read the whole sequence there. It needs no
state between the chunks of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.core.types import Pooled, StepPlan, Wants
from quire.runner.parts.base import ForwardOutput, StepPart
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device, to_host_async


class PoolingPart(StepPart, frozen=True, array_like=True):
    """The pooled rows of one step."""

    plan_rows: list[int]
    last_tokens: list[int]  # index of each one's last token among the step's T tokens

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> PoolingPart | None:
        """Copy from the plan; None if no row wants a pooled result."""
        if batch.decode_only or all(row.wants is not Wants.POOLED for row in plan.rows):
            return None
        part = cls([], [])
        for at, i in enumerate(batch.rows):
            if plan.rows[i].wants is not Wants.POOLED:
                continue
            part.plan_rows.append(i)
            part.last_tokens.append(int(batch.q_starts[at + 1]) - 1)
        return part

    def apply(self, forward: ForwardOutput) -> PendingPooled:
        """Start the copies to the host."""
        chosen = to_device(self.last_tokens, forward.hidden.device)
        states = forward.hidden.index_select(0, chosen).float()
        return PendingPooled(self, to_host_async(states))


@dataclass(frozen=True, slots=True)
class PendingPooled:
    """Hidden states whose copies to the host have started."""

    part: PoolingPart
    states: Tensor  # [rows, E] float32

    def result(self) -> dict[str, dict[int, Pooled]]:
        """Return row -> its hidden state [E]."""
        shape = tuple(self.states.shape[1:])
        rows = self.states.numpy().tobytes()
        size = len(rows) // len(self.states)
        pooled = {
            row: Pooled(shape, rows[i * size : (i + 1) * size])
            for i, row in enumerate(self.part.plan_rows)
        }
        return {"pooled": pooled}


PART = PoolingPart
