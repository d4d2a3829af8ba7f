"""Plain weights in the model's dtype, packed once for the CPU's matrix kernels where that helps."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.linear import linear, pack
from quire.quant.base import Weighted


class Method:
    """No quantization."""

    name = "none"

    def finish(self, layer: Weighted) -> None:
        """Pack the weight; `pack` gives it back as it is where no packed kernel exists."""
        weight = layer.weight
        assert isinstance(weight, Tensor), f"weight is already {type(weight).__name__}"
        packed = pack(weight.detach())
        if packed is not weight:
            layer.put("weight", packed)

    def apply(self, layer: Weighted, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)
