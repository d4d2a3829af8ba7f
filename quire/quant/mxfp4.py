"""Experts stored in four bits (MXFP4, as GPT-OSS is published), dequantized layer by layer.

    <name>_blocks  [X, rows, inputs / 32, 16] uint8     two e2m1 values a byte, the low half first
    <name>_scales  [X, rows, inputs / 32] uint8         a power of two per 32 values, biased by 127

The method is chosen by the tensors of the checkpoint, not by its config.json: a copy saved without
quantization may keep the setting. Every value is exact in bfloat16. Another method may follow,
which quantizes what this one has dequantized.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.quant import none
from quire.quant.base import Method as QuantMethod
from quire.quant.base import ParamSpec, QuantizableLayer
from quire.weights.mapping import InitSpec

BLOCK, BYTES = 32, 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127


class Method:
    """e2m1 codes on disk; in memory bfloat16 weights, or those of the next method."""

    name = "mxfp4"
    is_stored = True

    def __init__(self, then: QuantMethod | None = None) -> None:
        self._then = then or none.Method()

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role == "experts"

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        scales = ParamSpec(dtype=torch.uint8, inputs_per=BLOCK, init=InitSpec(BIAS - 4, 0.0))
        blocks = ParamSpec(
            dtype=torch.uint8, inputs_per=BLOCK, trailing=(BYTES,), init=InitSpec(127.0, 30.0)
        )
        return {"blocks": blocks, "scales": scales}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            plain = dequantize(values["blocks"], values["scales"])
            layer.set_param(matrix, plain.transpose(1, 2))
        self._then.process_after_load(layer, dtype)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """[X, rows, n, 16] and [X, rows, n], uint8 -> [X, 32 n, rows] bfloat16, a transposed view."""
    values = torch.tensor(VALUES + tuple(-v for v in VALUES), device=blocks.device)
    pair = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # of every byte
    shape = (*blocks.shape[:2], 32 * blocks.shape[2])
    out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for one, packed, powers in zip(out, blocks, scales):  # by expert: float32 takes much memory
        wide = pair[packed.long()].flatten(-2)  # [rows, n, 32]
        one.copy_(torch.ldexp(wide, (powers.int() - BIAS)[..., None]).flatten(-2))
    return out.transpose(1, 2)
