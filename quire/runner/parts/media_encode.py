"""Media encode part: encodes the items that a step is the first to need.

It runs before the forward pass and changes nothing of it, so a step with it can be a graph.
"""

from __future__ import annotations

from quire.core.scheduling.limits.media_encoder import MediaSteps
from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.runner.media.encoder_pool import EncodeItem, find_pool
from quire.runner.parts.base import StepPart
from quire.runner.profiler import span
from quire.runner.step_batch import StepBatch


class MediaEncodePart(StepPart, frozen=True, array_like=True):
    """The new items of one step."""

    items: tuple[EncodeItem, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> MediaEncodePart | None:
        """Copy from the plan; None if it encodes nothing."""
        found = next((part for part in plan.parts if isinstance(part, MediaSteps)), None)
        if found is None:
            return None
        encodes = found.ranks[plan.rows[0].seq.dp_rank].encodes
        if not encodes:
            return None
        return cls(
            tuple(
                EncodeItem(item.modality, item.num_rows, item.tensors, pages)
                for item, pages in encodes
            )
        )

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        """Run the encoder, on the stage that has it."""
        pool = find_pool(model)
        if pool is not None:
            with span("encode"):
                pool.encode(self.items)


PART = MediaEncodePart
