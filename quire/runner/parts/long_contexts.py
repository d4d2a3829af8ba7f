"""Long contexts part: marks steps whose decoding rows divide their keys evenly among programs."""

from __future__ import annotations

from quire.config.memory.captured_steps import CAPTURED_TOKENS
from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.runner.long_contexts import (
    LARGE_SHARE,
    LEAST_KEYS,
    LONE_CONTEXT,
    LONG_CONTEXT,
    MOST_ROWS,
    LongContextRows,
    find_long_contexts,
)
from quire.runner.parts.base import StepPart
from quire.runner.slots import TableShape
from quire.runner.step_batch import StepBatch


class LongContextsPart(StepPart, frozen=True, array_like=True):
    """Some row that decodes has a long context."""

    divides_attention = 2

    @classmethod
    def is_used(cls, shape: TableShape) -> bool:
        return shape.divides_keys

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> LongContextsPart | None:
        """None if no context is long, or another feature has a part in the step."""
        if batch.max_context < LONG_CONTEXT or not cls.serves(batch) or plan.parts:
            return None
        contexts = batch.contexts[: batch.num_decodes]
        longest, keys = int(contexts.max()), int(contexts.sum())
        least = LONE_CONTEXT if batch.num_decodes == 1 else LEAST_KEYS
        if longest < LONG_CONTEXT or keys < least or longest < LARGE_SHARE * keys:
            return None
        return cls()

    @classmethod
    def serves(cls, batch: StepBatch) -> bool:
        """Whether a step of so many rows may have the part. Small ones with prompts have graphs,
        which are of no variant."""
        if batch.uses_drafts or not 0 < batch.num_decodes <= MOST_ROWS:
            return False
        return batch.decode_only or len(batch.token_ids) > CAPTURED_TOKENS

    @classmethod
    def variant(cls, model: LanguageModel) -> LongContextRows | None:
        return find_long_contexts(model)


PART = LongContextsPart
