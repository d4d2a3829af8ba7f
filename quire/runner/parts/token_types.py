"""Token types part: the segment of each token, of models that tell two texts of a prompt apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.core.types import StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device


class TokenTypesPart(StepPart, frozen=True, array_like=True):
    """types: one byte for each of the step's T tokens."""

    types: bytes

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> TokenTypesPart | None:
        """Copy from the plan; None if no row has any: that costs one attribute per row."""
        if not batch.may_have_prompts or not any(row.seq.request.token_types for row in plan.rows):
            return None
        pieces = []
        for i in batch.rows:
            row = plan.rows[i]
            own = row.seq.request.token_types[row.start : row.start + row.count]
            pieces.append(own.ljust(row.count, b"\0"))
        return cls(b"".join(pieces))

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Set the types; padding tokens at the end have type 0."""
        types = np.zeros(len(step.token_ids), np.int32)
        types[: len(self.types)] = np.frombuffer(self.types, np.uint8)
        return replace(step, token_types=to_device(types, step.token_ids.device))


PART = TokenTypesPart
