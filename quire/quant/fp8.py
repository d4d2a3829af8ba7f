"""Weights in e4m3 with float32 scales, read from a checkpoint or made as a plain one is loaded.

On load a layer is quantized when its last tensor has come, and its plain form freed, so the peak
is the small model plus one layer. A checkpoint's scales are parameters that it must fill: one per
tensor (held as one per output, so that fused parts keep their own), per output, or per block.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from quire.config.quantization import QuantFacts
from quire.errors import ConfigError
from quire.kernels.formats.fp8_weight import (
    BLOCK_SIZE,
    E4M3,
    Fp8ExpertWeights,
    Fp8Weight,
    quantize_blocks,
)
from quire.kernels.linear import linear
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.quant.base import ExpertWeights, QuantizableLayer
from quire.weights.mapping import InitSpec, WeightShard

INPUT_SCALE = "input_scale"
DUMMY_WEIGHT_STD = 64.0
"""Spread of stand-in weights in e4m3: six of it stay below 448, where numbers end."""

CHUNK_ELEMENTS = 1 << 24
"""Elements quantized at once: blocks are found in float32, which is twice or four times as wide."""


class Method:
    """e4m3 weights, e4m3 activations, float32 sums."""

    name = "fp8"

    def __init__(self, facts: QuantFacts) -> None:
        self._facts = facts
        self._dtypes: dict[str, torch.dtype] = {}
        if facts.is_stored:
            self._dtypes = {"weight": E4M3, facts.scale: torch.float32}
            self._dtypes |= {INPUT_SCALE: torch.float32} if facts.static_activations else {}

    @property
    def extra_params(self) -> tuple[str, ...]:
        """The scales of a checkpoint that has them."""
        return tuple(name for name in self._dtypes if name != "weight")

    def dtype(self, param: str) -> torch.dtype | None:
        return self._dtypes.get(param)

    def layout(self, weight: tuple[WeightShard, ...], param: str) -> tuple[WeightShard, ...]:
        """Per part of the weight, its scale: [1], [O] or [O / 128, I / 128]."""
        parts = weight
        if param == INPUT_SCALE:
            return tuple(
                WeightShard((1,), (range(1),), i, broadcastable=True) for i in range(len(parts))
            )
        if not self._facts.block:
            return tuple(
                WeightShard(p.shape[:1], p.ranges[:1], p.start, broadcastable=True) for p in parts
            )
        cuts = [
            (_block_range(p.ranges[0], p.shape[0]), _block_range(p.ranges[1], p.shape[1]))
            for p in parts
        ]
        starts = accumulate((len(rows) for rows, _ in cuts), initial=0)
        if any(p.start % BLOCK_SIZE for p in parts):
            sizes = [p.shard_shape[0] for p in parts]
            raise ConfigError(
                f"parts of {sizes} outputs share one matrix, but not blocks of {BLOCK_SIZE}: "
                "this model cannot be held in fp8 by blocks"
            )
        shapes = [tuple(-(-n // BLOCK_SIZE) for n in p.shape) for p in parts]
        return tuple(WeightShard(shape, cut, at) for shape, cut, at in zip(shapes, cuts, starts))

    def init_spec(self, inputs: int, param: str) -> InitSpec | None:
        if param not in self._dtypes:
            return None
        if param == INPUT_SCALE:
            return InitSpec(0.01, 0.0)
        return (
            InitSpec(0.0, DUMMY_WEIGHT_STD)
            if param == "weight"
            else InitSpec(inputs**-0.5 / DUMMY_WEIGHT_STD, 0.0)
        )

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor), f"weight is already {type(weight).__name__}"
        if not self._facts.is_stored:
            layer.set_param(
                "weight", with_kernel_buffers(quantize(weight.detach(), self._facts.block))
            )
            return
        static = (
            getattr(layer, INPUT_SCALE).detach().amax().view(1)
            if self._facts.static_activations
            else None
        )
        scale = getattr(layer, self._facts.scale).detach()
        layer.set_param("weight", with_kernel_buffers(Fp8Weight(weight.detach(), scale, static)))
        for name in self.extra_params:
            layer.set_param(name, None)

    def process_experts_after_loading(self, bank: ExpertWeights) -> None:
        for name in bank.matrices:
            data = getattr(bank, name).detach()
            if not self._facts.is_stored:
                bank.set_param(name, quantize_experts(data, self._facts.block))
                continue
            scale, *rest = (getattr(bank, f"{name}_{one}").detach() for one in self.extra_params)
            static = rest[0].amax().view(1) if rest else None
            if not self._facts.block:
                scale = scale.view(len(data), -1)
            bank.set_param(name, Fp8ExpertWeights(data, scale, static))
            for one in self.extra_params:
                bank.set_param(f"{name}_{one}", None)

    def apply(self, layer: QuantizableLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)


def with_kernel_buffers(weight: Fp8Weight) -> Fp8Weight:
    """With what the kernels of its device want beside it."""
    if weight.device.type == "cpu":
        return weight
    bands, device = -(-weight.shape[0] // 16), weight.device
    tickets = torch.zeros(bands, dtype=torch.int32, device=device)
    return replace(weight, counters=tickets, unit_scale=torch.ones(1, device=device))


def quantize(weight: Tensor, block: int) -> Fp8Weight:
    """A plain weight [O, I] in eight bits, a stripe of rows at a time."""
    outputs, inputs = weight.shape
    step = max(CHUNK_ELEMENTS // inputs // BLOCK_SIZE, 1) * BLOCK_SIZE
    data = torch.empty(outputs, inputs, dtype=E4M3, device=weight.device)
    scales = []
    for at in range(0, outputs, step):
        stripe = weight[at : at + step]
        if block:
            made = quantize_blocks(stripe)
            data[at : at + step], scale = made.data, made.scale
        else:
            data[at : at + step], scale = quantize_fp8(stripe)  # an output is a row as any other
        scales.append(scale)
    return Fp8Weight(data, torch.cat(scales))


def quantize_experts(bank: Tensor, block: int) -> Fp8ExpertWeights:
    """Plain weights of experts [X, O, I] in eight bits."""
    ones = [quantize(one, block) for one in bank]
    return Fp8ExpertWeights(
        torch.stack([one.data for one in ones]), torch.stack([one.scale for one in ones])
    )


def _block_range(cut: range, size: int) -> range:
    """The blocks of a cut that starts and ends at edges of blocks."""
    if cut.start % BLOCK_SIZE or (cut.stop % BLOCK_SIZE and cut.stop != size):
        raise ConfigError(
            f"tensor parallelism cuts {size} into [{cut.start}, {cut.stop}), through blocks of "
            f"{BLOCK_SIZE} that share a scale; use fewer ranks"
        )
    return range(cut.start // BLOCK_SIZE, -(-cut.stop // BLOCK_SIZE))
