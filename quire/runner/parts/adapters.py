"""Adapters part: the adapter of each row, and the weights of adapters that get a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from quire.core.scheduling.limits.adapters import AdapterSlots
from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.runner.adapters.adapted_layer import SlotLoad
from quire.runner.adapters.banks import find_banks
from quire.runner.adapters.row_norms import NormsRequest
from quire.runner.parts.base import StepPart, StepVariant
from quire.runner.plain_data import decode_as, encode
from quire.runner.step_batch import StepBatch
from quire.weights.adapters.adapter import Adapter


class AdaptersPart(StepPart, frozen=True, array_like=True):
    """slots: int32 of each of the step's rows, -1: no adapter."""

    slots: bytes
    loads: tuple[SlotLoad, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> AdaptersPart | None:
        """Copy from the plan; None if no row has an adapter."""
        found = next((part for part in plan.parts if isinstance(part, AdapterSlots)), None)
        if found is None:
            return None
        slots = [
            -1 if (adapter := row.seq.request.adapter) is None else found.slots[adapter.digest]
            for row in (plan.rows[i] for i in batch.rows)
        ]
        loads = []
        for slot, weights in found.loads:
            read = cast(Adapter, weights)
            loads.append(SlotLoad(slot, read.deltas, read.packed))
        return cls(np.array(slots, np.int32).tobytes(), tuple(loads))

    @classmethod
    def variant(cls, model: LanguageModel) -> StepVariant | None:
        return find_banks(model)

    @classmethod
    def variants(cls, model: LanguageModel) -> Sequence[StepVariant]:
        banks = find_banks(model)
        return () if banks is None else banks.forms()

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        """Fill slots, and set the adapter of each row's sequence."""
        banks = find_banks(model)
        assert banks is not None, "a step with adapters, of a model without banks"
        slots = np.frombuffer(self.slots, np.int32)
        banks.load({*slots.tolist()}, self.loads)
        banks.assign(batch.slots, slots)

    @classmethod
    def call(cls, model: LanguageModel, request: bytes) -> bytes:
        """Return the norms of rows of one layer, which DoRA needs before a load."""
        banks = find_banks(model)
        assert banks is not None, "norms for adapters, of a model without banks"
        return encode(banks.norms(decode_as(request, NormsRequest)))


PART = AdaptersPart
