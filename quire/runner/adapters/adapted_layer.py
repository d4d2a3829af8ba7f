"""Contract of a layer that adapters change, and what travels with a step to fill a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from quire.kernels.formats.lora_bank import LoraRows, SlotCopy
from quire.weights.adapters.adapter import Delta, Deltas, PackedTensors


class SlotLoad(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """An adapter that gets a slot. packed: its memory, if a GPU of this process can read it."""

    slot: int
    deltas: Deltas
    packed: PackedTensors | None = None


class StepRows:
    """The rows of adapters in what runs now; None: it has none.

    rows: the tokens of the forward pass. sampled: the hidden states of which logits are computed.
    Tapes and graphs keep what a layer reads here, so its tensors have fixed addresses. A layer that
    replaces a tensor of its bank counts it in `revision`: what was captured has the old one.
    """

    __slots__ = ("revision", "rows", "sampled")

    def __init__(self) -> None:
        self.rows: LoraRows | None = None
        self.sampled: LoraRows | None = None
        self.revision = 0


class AdaptedLayer(Protocol):
    """One layer of a rank's model with a place for each slot."""

    @property
    def numel(self) -> int:
        """Numbers of its banks, in the model's dtype."""
        ...

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        """Yield what a slot gets for an adapter, in which a part that is absent is as in the model.

        parts: whole; this rank's share is copied. Everything that another adapter may have left in
        the slot, and that is read, is overwritten. Sources are views of the tensors of `parts`, or
        follow from the shapes of those alone.
        """
        ...
