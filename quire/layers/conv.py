"""Convolution over time, of encoders of audio."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.layers.param_module import ParamModule
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout


class Conv1d(ParamModule):
    """Convolves channels over time; every rank does it whole. It runs once per recording."""

    weight: Tensor
    bias: Tensor

    def __init__(self, inputs: int, outputs: int, width: int, *, stride: int = 1) -> None:
        """width: steps of the kernel, an odd number; half of it is padded on each side."""
        super().__init__()
        self.inputs, self.outputs, self.width, self.stride = inputs, outputs, width, stride
        self.declare("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """x [inputs, n] -> [outputs, ceil(n / stride)]."""
        lazy_fusion.flush()
        if x.is_cuda and x.dtype == torch.float32:
            return self.product(x)
        y = F.conv1d(x[None], self.weight, self.bias, self.stride, padding=self.width // 2)
        return y[0]

    def product(self, x: Tensor) -> Tensor:
        """What forward() returns, as a product of matrices: a GPU convolves float32 in TF32."""
        padded = F.pad(x, (self.width // 2, self.width // 2))
        parts = padded.unfold(1, self.width, self.stride)  # [inputs, n', width]
        parts = parts.permute(0, 2, 1).reshape(self.inputs * self.width, -1)
        return torch.addmm(self.bias[:, None], self.weight.flatten(1), parts)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if param == "bias":
            return unsharded_layout((self.outputs,))
        return unsharded_layout((self.outputs, self.inputs, self.width))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, (self.inputs * self.width) ** -0.5)
