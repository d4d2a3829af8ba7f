"""A matrix whose inputs and outputs are clipped to four numbers of the checkpoint (Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear, ParamModule
from quire.weights.mapping import InitSpec, WeightShard

LIMITS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(ParamModule):
    """clip(clip(x) W)."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, inputs: int, outputs: int, *, clips: bool) -> None:
        super().__init__()
        self.linear, self.clips = Linear(inputs, outputs), clips
        if clips:
            self.declare(*LIMITS)

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return self.linear(x)
        lazy_fusion.flush()
        y = self.linear(torch.clamp(x, self.input_min, self.input_max))
        lazy_fusion.flush()
        return torch.clamp(y, self.output_min, self.output_max)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return (WeightShard((1,), (range(1),), broadcastable=True),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(-100.0 if param.endswith("min") else 100.0, 0.0)
