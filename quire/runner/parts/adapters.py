"""Adapters part: the adapter of each token, and the weights of adapters that get a slot."""

from __future__ import annotations

from typing import cast

import numpy as np

from quire.core.scheduling.limits.adapters import AdapterSlots
from quire.core.types import StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.runner.adapters.adapted_layer import SlotLoad
from quire.runner.adapters.banks import banks_of
from quire.runner.parts.base import StepPart
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device
from quire.weights.adapters.adapter import Adapter


class AdaptersPart(StepPart, frozen=True, array_like=True):
    """slots: int32 of each of the step's T tokens, -1: no adapter."""

    slots: bytes
    loads: tuple[SlotLoad, ...]

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> AdaptersPart | None:
        """Copy from the plan; None if no row has an adapter."""
        found = next((part for part in plan.parts if isinstance(part, AdapterSlots)), None)
        if found is None:
            return None
        rows = [plan.rows[i] for i in batch.rows]
        slots = [
            -1 if (adapter := row.seq.request.adapter) is None else found.slots[adapter.digest]
            for row in rows
        ]
        each = np.repeat(np.array(slots, np.int32), [row.count for row in rows])
        loads = []
        for slot, weights in found.loads:
            read = cast(Adapter, weights)
            loads.append(SlotLoad(slot, read.deltas, read.packed))
        return cls(each.tobytes(), tuple(loads))

    def before_forward(self, model: LanguageModel, step: StepInputs) -> StepInputs:
        """Fill slots, and set the rows of the forward pass."""
        banks = banks_of(model)
        given = np.frombuffer(self.slots, np.int32)
        banks.load({*given.tolist()}, self.loads)
        slots = np.full(len(step.token_ids), -1, np.int32)  # tokens that pad a step have none
        slots[: len(given)] = given
        banks.begin_forward(to_device(slots, step.token_ids.device))
        return step


PART = AdaptersPart
