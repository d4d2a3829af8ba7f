"""Plain weights in the model's dtype, packed once for the CPU's matrix kernels where that helps."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.quantization import QuantFacts
from quire.kernels.linear import linear, pack
from quire.quant.base import Bank, Weighted
from quire.weights.mapping import Part, Spread


class Method:
    """No quantization."""

    name = "none"
    extra: tuple[str, ...] = ()

    def __init__(self, facts: QuantFacts | None = None) -> None:
        assert facts is None, facts

    def layout(self, weight: tuple[Part, ...], param: str) -> tuple[Part, ...]:
        raise AssertionError(f"no parameter {param!r}")

    def dtype(self, param: str) -> torch.dtype | None:
        return None

    def spread(self, inputs: int, param: str) -> Spread | None:
        return None

    def finish(self, layer: Weighted) -> None:
        """Pack the weight; `pack` gives it back as it is where no packed kernel exists."""
        weight = layer.weight
        assert isinstance(weight, Tensor), f"weight is already {type(weight).__name__}"
        packed = pack(weight.detach())
        if packed is not weight:
            layer.put("weight", packed)

    def finish_bank(self, bank: Bank) -> None:
        """Nothing: banks are multiplied as they are."""

    def apply(self, layer: Weighted, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)
