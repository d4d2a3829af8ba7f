"""Contract of a layer that adapters change, and what travels to it with a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from quire.kernels.formats.lora_bank import LoraRows

PartDelta = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None"]
"""a [r, I], b [r, O], bias [O], and magnitude [O] of DoRA, whole: not cut over ranks."""
LayerDeltas = dict[int, PartDelta]
"""Of one layer, by part."""


class StepRows:
    """The rows of adapters in the current forward pass; None: it has none."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


class AdaptedLayer(Protocol):
    """One layer of a rank's model with a place for each slot."""

    def write(self, slot: int, parts: Mapping[int, PartDelta]) -> None:
        """Fill a slot, on the current stream. A part that is absent is as in the model."""
        ...
