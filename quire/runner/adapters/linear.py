"""Linear layers with adapters.

The weight of the layer is wrapped: the product is that of the inner weight, of whatever form, and
rows of adapters get their delta added. A step without such rows multiplies as if there were no
banks. Ranks cut a delta as they cut the weight: B by outputs, or A by inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraPart, LoraRows, SlotCopy
from quire.kernels.formats.weight import StoredWeight
from quire.kernels.lora import lora_linear
from quire.layers import Linear
from quire.runner.adapters.adapted_layer import AdaptedLayer, SlotSizes, StepRows, WrappedWeight
from quire.weights.adapters.adapter import Delta, LinearDelta, is_scaled


class LoraWeight(WrappedWeight):
    """A weight with a bank of deltas."""

    __slots__ = ("_views", "bank", "scaled")

    def __init__(
        self, inner: StoredWeight, bank: LoraBank, step: StepRows, narrow_rank: int
    ) -> None:
        """bank: may have factors and shifts; steps without a scaled adapter do not read them.

        narrow_rank: the most ranks of adapters in steps that are not wide.
        """
        super().__init__(inner, step)
        self.scaled, self.bank = bank, replace(bank, factor=None, shift=None)
        self._views = {
            (scaled, wide): whole if wide else whole.narrow(narrow_rank)
            for scaled, whole in ((False, self.bank), (True, self.scaled))
            for wide in (False, True)
        }

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y, rows = self.inner.product(x, bias), self._rows()
        if rows is None:
            return y
        return lora_linear(y, x, self._views[self.step.is_scaled, self.step.is_wide], rows)

    def reset_scale(self, slot: int) -> None:
        """Set factors and shifts of a slot as in the model."""
        bank = self.scaled
        assert bank.factor is not None
        assert bank.shift is not None
        bank.factor[slot].fill_(1)
        bank.shift[slot].fill_(0)

    def _rows(self) -> LoraRows | None:
        """The rows that the next product multiplies."""
        return self.step.rows


class AdaptedLinear(AdaptedLayer):
    """A linear layer of one rank, and its bank."""

    weight_class: ClassVar[type[LoraWeight]] = LoraWeight

    def __init__(self, layer: Linear, sizes: SlotSizes, step: StepRows) -> None:
        cut = layer.weight_layout("weight")
        parts = tuple(len(part.ranges[0]) for part in cut)
        bank = sizes.bank(len(cut[0].ranges[1]), parts, scaled=True)
        self._layer = layer
        self._weight = self.weight_class(layer.weight, bank, step, sizes.narrow_rank)
        layer.set_param("weight", self._weight)

    @property
    def numel(self) -> int:
        return self._weight.bank.numel

    @property
    def scales(self) -> int:
        return 2 * sum(self._weight.bank.parts)

    def copies(self, parts: Mapping[int, Delta]) -> Iterator[SlotCopy]:
        found: list[LoraPart | None] = []
        cut = self._layer.weight_layout("weight")
        for part, place in enumerate(cut):
            delta = parts.get(part)
            assert delta is None or isinstance(delta, LinearDelta), "not a delta of a linear layer"
            found.append(None if delta is None else self._cut(delta, *place.ranges))
        bank = self._weight.scaled if any(map(is_scaled, parts.values())) else self._weight.bank
        return bank.copies(found)

    def _cut(self, delta: LinearDelta, rows: range, columns: range) -> LoraPart:
        """Return what this rank has of a delta. A shift is in the sum over ranks once."""
        outputs = slice(rows.start, rows.stop)
        first = len(columns) == self._layer.inputs or self._layer.mesh.tp_rank == 0
        return LoraPart(
            delta.a[:, columns.start : columns.stop],
            delta.b[:, outputs],
            None if delta.factor is None else delta.factor[outputs],
            None if delta.bias is None or not first else delta.bias[outputs],
        )

    def reset_scale(self, slot: int) -> None:
        self._weight.reset_scale(slot)
