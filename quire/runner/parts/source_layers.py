"""Source layers part: lets layers of cross attention run, where a row has images that they see.

Steps without it leave them out. They are a variant, with tapes and graphs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

from torch import Tensor

from quire.core.types import StepPlan
from quire.models.base import LanguageModel, SourceSwitch, StepInputs
from quire.runner.adapters.banks import find_banks
from quire.runner.parts.base import NoOwnGraphs, StepPart, StepVariant
from quire.runner.slots import TableShape
from quire.runner.step_batch import StepBatch


class SourceLayers(NoOwnGraphs):
    """The variant of a model with such layers."""

    name = "sources"
    changes_logits = False
    decodes = True
    least_rows = 1
    most_rows = None
    has_prompts = True
    rotary_axes = 1

    def __init__(self, switch: SourceSwitch) -> None:
        self._switch = switch

    def reset(self) -> None:
        pass

    def inputs(self, step: StepInputs) -> StepInputs:
        return step

    @contextmanager
    def forward(self, token_slots: Tensor) -> Iterator[None]:
        self._switch.on = True
        try:
            yield
        finally:
            self._switch.on = False

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()


class SourceLayersPart(StepPart, frozen=True, array_like=True):
    """Has no data: some row has images."""

    keeps_graphs = True

    @classmethod
    def is_used(cls, shape: TableShape) -> bool:
        return shape.has_cross

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> SourceLayersPart | None:
        items = (item for i in batch.rows for item in plan.rows[i].seq.request.media)
        return cls() if any(item.source_rows for item in items) else None

    @classmethod
    def variant(cls, model: LanguageModel) -> StepVariant | None:
        """None beside adapters, whose steps have a variant already: the layers run in all steps."""
        switch = getattr(model, "source_switch", None)
        if switch is None:
            return None
        if find_banks(model) is not None:
            switch.on = True
            return None
        found = getattr(model, "source_layers", None)
        if found is None:
            found = model.source_layers = SourceLayers(switch)  # type: ignore[attr-defined]
        return cast(StepVariant, found)


PART = SourceLayersPart
