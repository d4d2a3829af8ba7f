"""Convolution over time, of encoders of audio."""

from __future__ import annotations

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
        y = F.conv1d(x[None], self.weight, self.bias, self.stride, padding=self.width // 2)
        return y[0]

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        if param == "bias":
            return unsharded_layout((self.outputs,))
        return unsharded_layout((self.outputs, self.inputs, self.width))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, (self.inputs * self.width) ** -0.5)
