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
from quire.kernels.fp8 import BLOCK, E4M3, Fp8Bank, Fp8Weight, quantize_blocks
from quire.kernels.linear import linear
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.quant.base import Bank, Weighted
from quire.weights.mapping import Part, Spread

STATIC = "input_scale"
DRAWN = 64.0
"""Spread of stand-in weights in e4m3: six of it stay below 448, where numbers end."""

CHUNK = 1 << 24
"""Elements quantized at once: blocks are found in float32, which is twice or four times as wide."""


class Method:
    """e4m3 weights, e4m3 activations, float32 sums."""

    name = "fp8"

    def __init__(self, facts: QuantFacts) -> None:
        self._facts = facts
        self._dtypes: dict[str, torch.dtype] = {}
        if facts.stored:
            self._dtypes = {"weight": E4M3, facts.scale: torch.float32}
            self._dtypes |= {STATIC: torch.float32} if facts.static else {}

    @property
    def extra(self) -> tuple[str, ...]:
        """The scales of a checkpoint that has them."""
        return tuple(name for name in self._dtypes if name != "weight")

    def dtype(self, param: str) -> torch.dtype | None:
        return self._dtypes.get(param)

    def layout(self, weight: tuple[Part, ...], param: str) -> tuple[Part, ...]:
        """Per part of the weight, its scale: [1], [O] or [O / 128, I / 128]."""
        parts = weight
        if param == STATIC:
            return tuple(Part((1,), (range(1),), i, loose=True) for i in range(len(parts)))
        if not self._facts.block:
            return tuple(Part(p.shape[:1], p.cut[:1], p.start, loose=True) for p in parts)
        cuts = [(_blocks(p.cut[0], p.shape[0]), _blocks(p.cut[1], p.shape[1])) for p in parts]
        starts = accumulate((len(rows) for rows, _ in cuts), initial=0)
        if any(p.start % BLOCK for p in parts):
            sizes = [p.kept[0] for p in parts]
            raise ConfigError(
                f"parts of {sizes} outputs share one matrix, but not blocks of {BLOCK}: "
                "this model cannot be held in fp8 by blocks"
            )
        shapes = [tuple(-(-n // BLOCK) for n in p.shape) for p in parts]
        return tuple(Part(shape, cut, at) for shape, cut, at in zip(shapes, cuts, starts))

    def spread(self, inputs: int, param: str) -> Spread | None:
        if param not in self._dtypes:
            return None
        if param == STATIC:
            return Spread(0.01, 0.0)
        return Spread(0.0, DRAWN) if param == "weight" else Spread(inputs**-0.5 / DRAWN, 0.0)

    def finish(self, layer: Weighted) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor), f"weight is already {type(weight).__name__}"
        if not self._facts.stored:
            layer.put("weight", ready(quantize(weight.detach(), self._facts.block)))
            return
        static = getattr(layer, STATIC).detach().amax().view(1) if self._facts.static else None
        scale = getattr(layer, self._facts.scale).detach()
        layer.put("weight", ready(Fp8Weight(weight.detach(), scale, static)))
        for name in self.extra:
            layer.put(name, None)

    def finish_bank(self, bank: Bank) -> None:
        for name in bank.matrices:
            data = getattr(bank, name).detach()
            if not self._facts.stored:
                bank.put(name, quantize_bank(data, self._facts.block))
                continue
            scale, *rest = (getattr(bank, f"{name}_{one}").detach() for one in self.extra)
            static = rest[0].amax().view(1) if rest else None
            if not self._facts.block:
                scale = scale.view(len(data), -1)
            bank.put(name, Fp8Bank(data, scale, static))
            for one in self.extra:
                bank.put(f"{name}_{one}", None)

    def apply(self, layer: Weighted, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)


def ready(weight: Fp8Weight) -> Fp8Weight:
    """With what the kernels of its device want beside it."""
    if weight.device.type == "cpu":
        return weight
    bands, device = -(-weight.shape[0] // 16), weight.device
    tickets = torch.zeros(bands, dtype=torch.int32, device=device)
    return replace(weight, tickets=tickets, one=torch.ones(1, device=device))


def quantize(weight: Tensor, block: int) -> Fp8Weight:
    """A plain weight [O, I] in eight bits, a stripe of rows at a time."""
    outputs, inputs = weight.shape
    step = max(CHUNK // inputs // BLOCK, 1) * BLOCK
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


def quantize_bank(bank: Tensor, block: int) -> Fp8Bank:
    """Plain weights of experts [X, O, I] in eight bits."""
    ones = [quantize(one, block) for one in bank]
    return Fp8Bank(
        torch.stack([one.data for one in ones]), torch.stack([one.scale for one in ones])
    )


def _blocks(cut: range, size: int) -> range:
    """The blocks of a cut that starts and ends at edges of blocks."""
    if cut.start % BLOCK or (cut.stop % BLOCK and cut.stop != size):
        raise ConfigError(
            f"tensor parallelism cuts {size} into [{cut.start}, {cut.stop}), through blocks of "
            f"{BLOCK} that share a scale; use fewer ranks"
        )
    return range(cut.start // BLOCK, -(-cut.stop // BLOCK))
