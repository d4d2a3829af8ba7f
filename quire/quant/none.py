"""Plain weights in the model's dtype, packed once for the CPU's matrix kernels where that helps."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.quantization import QuantFacts
from quire.kernels.linear import linear, pack
from quire.quant.base import ExpertWeights, QuantizableLayer
from quire.weights.mapping import InitSpec, WeightShard


class Method:
    """No quantization."""

    name = "none"
    extra_params: tuple[str, ...] = ()

    def __init__(self, facts: QuantFacts | None = None) -> None:
        assert facts is None, facts

    def layout(self, weight: tuple[WeightShard, ...], param: str) -> tuple[WeightShard, ...]:
        raise AssertionError(f"no parameter {param!r}")

    def dtype(self, param: str) -> torch.dtype | None:
        return None

    def init_spec(self, inputs: int, param: str) -> InitSpec | None:
        return None

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Pack the weight; `pack` gives it back as it is where no packed kernel exists."""
        weight = layer.weight
        assert isinstance(weight, Tensor), f"weight is already {type(weight).__name__}"
        packed = pack(weight.detach())
        if packed is not weight:
            layer.set_param("weight", packed)

    def process_experts_after_loading(self, bank: ExpertWeights) -> None:
        """Nothing: banks are multiplied as they are."""

    def apply(self, layer: QuantizableLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)
