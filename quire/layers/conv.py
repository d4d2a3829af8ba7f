"""Convolutions over time and of maps, of encoders."""

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


class Conv2d(ParamModule):
    """Convolves a map. groups: as many as inputs for a kernel of each channel."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        padding: int,
        groups: int = 1,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.shape = (outputs, inputs // groups, kernel, kernel)
        self.stride, self.padding, self.groups = stride, padding, groups
        if not bias:
            self.bias = None
        self.declare("weight", *(["bias"] if bias else []))

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N, R', C', E']."""
        lazy_fusion.flush()
        channels_first = x.permute(0, 3, 1, 2)
        if x.is_cuda and x.dtype == torch.float32 and self.groups == 1:
            return self.product(channels_first)
        y = F.conv2d(
            channels_first, self.weight, self.bias, self.stride, self.padding, groups=self.groups
        )
        return y.permute(0, 2, 3, 1).contiguous()

    def product(self, x: Tensor) -> Tensor:
        """What forward() returns for [N, E, R, C], as a product of matrices without groups: a GPU
        convolves float32 in TF32."""
        kernel = self.shape[2:]
        parts = F.unfold(x, kernel, padding=self.padding, stride=self.stride)  # [N, E k k, n]
        y = F.linear(parts.transpose(1, 2), self.weight.flatten(1), self.bias)
        rows = (x.shape[2] + 2 * self.padding - kernel[0]) // self.stride + 1
        return y.view(len(x), rows, -1, self.shape[0])

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout(self.shape if param == "weight" else self.shape[:1])

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, (self.shape[1] * self.shape[2] ** 2) ** -0.5)
