"""Source views part: lets tokens of a prompt see other sources than its last one.

A slot has the blocks of its last source, which tokens behind its last image see, and no others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch

from quire.attention.base import CrossAttentionStep, CrossMetadata
from quire.core.media.sources import sources_of
from quire.core.scheduling.limits.encoder_budget import PartialViews
from quire.core.types import NO_BLOCK, StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device


class SourceViewsPart(StepPart, frozen=True, array_like=True):
    """What each of a step's T tokens sees."""

    tables: tuple[list[int], ...]  # blocks of all sources of the step
    which: bytes  # int32 [T], an index of them
    lengths: bytes  # int32 [T]; 0: nothing is seen

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> SourceViewsPart | None:
        """Copy from the plan; None if each token sees what its slot has."""
        if not any(isinstance(part, PartialViews) for part in plan.parts):
            return None
        tables: list[list[int]] = [[]]
        which, lengths = np.zeros((2, len(batch.token_slots)), np.int32)
        for at, i in enumerate(batch.rows):
            row = plan.rows[i]
            first, end = (int(one) for one in batch.q_starts[at : at + 2])
            for source, table in zip(sources_of(row.seq.request), row.seq.cross_tables):
                for position, length in source.views():
                    seeing = slice(first + max(position - row.start, 0), end)
                    which[seeing], lengths[seeing] = len(tables), length
                tables.append(list(table))
        return cls(tuple(tables), which.tobytes(), lengths.tobytes())

    def before_forward(
        self, model: LanguageModel, step: StepInputs, variant: StepVariant
    ) -> StepInputs:
        """Give cross attention these sources."""
        which, lengths = (np.frombuffer(one, np.int32).copy() for one in (self.which, self.lengths))
        table = np.full((len(self.tables), max(map(len, self.tables)) or 1), NO_BLOCK, np.int32)
        for row, blocks in zip(table, self.tables):
            row[: len(blocks)] = blocks
        device = step.token_ids.device
        cross = CrossMetadata(
            table=to_device(table, device),
            lengths=to_device(lengths, device),
            starts=torch.arange(len(which) + 1, dtype=torch.int32, device=device),
            rows=to_device(which, device),
        )
        attention = cast(CrossAttentionStep, step.attention).with_sources(cross)
        return replace(step, attention=attention)


PART = SourceViewsPart
