"""Encoder slices part: one slice of what the media encoder makes of items beside decoding rows."""

from __future__ import annotations

import msgspec

from quire.core.scheduling.limits.media_encoder import MediaSteps
from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.runner.media.encoder_pool import EncodeItem
from quire.runner.media.media_rows import find_media_rows
from quire.runner.parts.base import ChangeTensors, StepPart
from quire.runner.profiler import span
from quire.runner.step_batch import StepBatch


class EncoderSlicesPart(StepPart, frozen=True, array_like=True):
    """A slice of the encoder's work on items, which earlier steps may have begun."""

    keeps_graphs = True

    items: tuple[EncodeItem, ...]  # tensors in the first slice, pages in the last
    blocks: tuple[int, int]  # [first, last) of the encoder's slices
    ends: bool

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> EncoderSlicesPart | None:
        """Copy from the plan; None if the step encodes no slice."""
        found = next((part for part in plan.parts if isinstance(part, MediaSteps)), None)
        if found is None or found.slice is None:
            return None
        one = found.slice
        begins = one.blocks[0] == 0
        items = [
            EncodeItem(item.modality, item.num_rows, item.tensors if begins else (), own)
            for item, own in one.encodes
        ]
        return cls(tuple(items), one.blocks, one.ends)

    @classmethod
    def call(cls, model: LanguageModel, request: bytes) -> bytes:
        """Run a slice as a step would: a part, as msgpack."""
        msgspec.msgpack.decode(request, type=cls)._run(model)
        return b""

    def with_tensors(self, change: ChangeTensors) -> EncoderSlicesPart:
        items = tuple([one.with_tensors(change) for one in self.items])
        return msgspec.structs.replace(self, items=items)

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        self._run(model)

    def _run(self, model: LanguageModel) -> None:
        """Run the slice, on the first pipeline stage."""
        found = find_media_rows(model)
        if found is None:
            return
        with span("encode"):
            if self.blocks[0] == 0:
                found.pool.begin_slices(self.items)
            if self.ends:
                found.pool.end_slices(self.items)
            else:
                found.pool.encode_slice(*self.blocks)


PART = EncoderSlicesPart
