"""Unattended tokens part: trailing tokens of prompts that are computed, and no token attends to.

For models without a cache, whose rows are whole prompts: ColBERT expands queries so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.attention.packed import PackedAttentionStep
from quire.core.types import StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device


class UnattendedTokensPart(StepPart, frozen=True, array_like=True):
    """counts: tokens of each sequence that are attended, in the order of the batch."""

    counts: list[int]  # [S]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> UnattendedTokensPart | None:
        """Copy from the plan; None if all tokens of all rows are attended."""
        if not batch.may_have_prompts:
            return None
        counts, some = [], False
        for i in batch.rows:
            row = plan.rows[i]
            pooling = row.seq.request.pooling
            unattended = 0 if pooling is None else pooling.unattended_tokens
            counts.append(row.count - unattended)
            some = some or unattended > 0
        return cls(counts) if some else None

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Set the numbers of keys; of rows that pad the step, 0: all of them."""
        attention = step.attention
        assert isinstance(attention, PackedAttentionStep), "a model with a cache attends to all"
        counts = np.zeros(len(attention.metadata.q_starts) - 1, np.int32)
        counts[: len(self.counts)] = self.counts
        on_device = to_device(counts, step.token_ids.device)
        return replace(step, attention=replace(attention, key_counts=on_device))


PART = UnattendedTokensPart
