"""Norms. Those named Add... take the residual too, and return it summed for the next layer."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.layer_norm import layer_norm
from quire.kernels.rms_norm import rms_norm
from quire.layers.param_module import VectorModule
from quire.weights.mapping import InitSpec


class RMSNorm(VectorModule):
    """y = x / rms(x) * (offset + weight), over the last axis."""

    weight: Tensor

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(size)
        self.eps, self.offset = eps, offset
        self.declare("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E], strided views allowed -> the same shape."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)[0]

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0 - self.offset, 0.02)


class AddRMSNorm(RMSNorm):
    """RMSNorm of x + residual."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual [T, E] -> (normed, x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual, self.offset)


class LayerNorm(VectorModule):
    """y = (x - mean) / deviation * weight + bias, over the last axis."""

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size)
        self.eps = eps
        self.declare("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]."""
        return layer_norm(x, self.weight, self.bias, self.eps)[0]

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0 if param == "weight" else 0.0, 0.02)


class AddLayerNorm(LayerNorm):
    """LayerNorm of x + residual."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, residual [T, E] -> (normed, x + residual)."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)
