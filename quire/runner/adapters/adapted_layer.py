"""Contract of a layer that adapters change, and what travels with a step to fill a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from quire.kernels.formats.lora_bank import RANK_STEP, LoraBank, LoraRows, SlotCopy
from quire.kernels.formats.weight import StoredWeight
from quire.weights.adapters.adapter import Delta, Deltas, PackedTensors


class SlotLoad(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """An adapter that gets a slot. packed: its memory, if a GPU of this process can read it."""

    slot: int
    deltas: Deltas
    packed: PackedTensors | None = None


class StepRows:
    """The rows of adapters in what runs now; None: it has none.

    rows: the tokens of the forward pass. sampled: the hidden states of which logits are computed.
    is_scaled: some adapter of the step changes products (is_scaled of a delta). is_wide: some has
    more ranks than LoraBank.narrow() was asked for. Tapes and graphs keep what a layer reads here,
    so its tensors have fixed addresses; those of steps with is_scaled, or is_wide, are others.
    """

    __slots__ = ("is_scaled", "is_wide", "rows", "sampled")

    def __init__(self) -> None:
        self.rows: LoraRows | None = None
        self.sampled: LoraRows | None = None
        self.is_scaled = False
        self.is_wide = False


class SlotSizes(NamedTuple):
    """What all layers have room for."""

    slots: int
    max_rank: int
    replaced_rows: int  # of a vocabulary, in each slot
    dtype: torch.dtype
    device: torch.device

    @property
    def narrow_rank(self) -> int:
        """The most ranks of adapters in steps with kernels for few: on a GPU these are others."""
        return self.max_rank if self.device.type == "cpu" else min(RANK_STEP, self.max_rank)

    def bank(
        self, inputs: int, parts: tuple[int, ...], experts: int = 1, *, scaled: bool = False
    ) -> LoraBank:
        """An empty bank of one layer. scaled: with factors and shifts."""
        given = self.slots, self.max_rank, inputs, parts, self.dtype, self.device
        return LoraBank.allocate(*given, experts=experts, factors=scaled, shifts=scaled)


class WrappedWeight(StoredWeight):
    """A weight with what adapters change of it. Everything else about it is the inner weight's."""

    __slots__ = ("inner", "step")
    kind = "adapted"

    def __init__(self, inner: StoredWeight, step: StepRows) -> None:
        self.inner, self.step = inner, step

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.inner.product(x, bias)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner.rows(ids, scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.inner.dequantize(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AdaptedLayer(Protocol):
    """One layer of a rank's model with a place for each slot."""

    @property
    def numel(self) -> int:
        """Numbers of its banks, in the model's dtype."""
        ...

    @property
    def scales(self) -> int:
        """Numbers of factors and shifts of a slot, in float32."""
        return 0

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        """Yield what a slot gets for an adapter, in which a part that is absent is as in the model.

        parts: whole; this rank's share is copied. Everything that another adapter may have left in
        the slot, and that is read, is overwritten. Sources are views of the tensors of `parts`, or
        follow from the shapes of those alone.
        """
        ...

    def reset_scale(self, slot: int) -> None:
        """Forget factors and shifts (is_scaled) that an adapter has left in a slot."""
        return
