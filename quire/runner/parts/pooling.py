"""Pooling part: computes the results of sequences that pool their hidden states.

All tokens of such sequences count, also those of chunks, so every row of theirs is part of it. The
results leave the device as one buffer of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.core.types import ALIGN, Sequence, StepPlan
from quire.pooling.pooler import PendingPool
from quire.pooling.pooling_rows import SEQUENCE_TASKS, PoolingRows, no_rows
from quire.runner.parts.base import ForwardOutput, StepPart
from quire.runner.step_batch import StepBatch


class PoolingPart(StepPart, frozen=True, array_like=True):
    """The rows of one step that pool."""

    plan_rows: list[int]  # [P]
    rows: PoolingRows

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> PoolingPart | None:
        """Copy from the plan; None if no row pools."""
        if batch.decode_only:
            return None
        part = cls([], no_rows())
        firsts = batch.q_starts.tolist()
        for at, i in enumerate(batch.rows):
            seq, start, count, _, _ = plan.rows[i]
            pooling = seq.request.pooling
            if pooling is None or pooling.task == ALIGN:
                continue
            if pooling.step_tag_id is not None and pooling.task not in SEQUENCE_TASKS:
                part.rows.tagged[len(part.rows)] = _tagged(seq, start, count, pooling.step_tag_id)
            end = start + count
            part.plan_rows.append(i)
            part.rows.add(seq.slot, firsts[at], start, count, end == len(seq.tokens), pooling)
        return part if part.plan_rows else None

    def apply(self, forward: ForwardOutput) -> PendingPoolingPart:
        """Start the pooling, and the copy of the results to the host."""
        assert forward.pooler is not None, "a pooled row in an engine without a pooler"
        started = forward.pooler.start(forward.hidden, self.rows, forward.variant.logits)
        return PendingPoolingPart(self.plan_rows, started)


def _tagged(seq: Sequence, start: int, count: int, tag: int) -> list[int]:
    return [i for i, token in enumerate(seq.tokens[start : start + count]) if token == tag]


@dataclass(frozen=True, slots=True)
class PendingPoolingPart:
    """Results whose copy to the host has started."""

    plan_rows: list[int]
    pending: PendingPool

    def result(self) -> dict[str, dict[int, Any]]:
        """Return the results by row of the plan."""
        pooled, wrong = self.pending.result()
        rows = self.plan_rows
        return {
            "pooled": {rows[i]: result for i, result in pooled.items()},
            "non_finite": {rows[i]: message for i, message in wrong.items()},
        }


PART = PoolingPart
