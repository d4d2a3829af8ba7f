"""MXFP4: e2m1 codes and a power of two per 32 inputs.

    weight_packed   [O, I / 2] uint8, the even input in the low half      compressed-tensors
    weight_scale    [O, I / 32] uint8, exponents biased by 127

    <name>_blocks   [X, rows, I / 32, 16] uint8, the same bytes           experts of GPT-OSS
    <name>_scales   [X, rows, I / 32] uint8

Stored as it is on disk; activations stay in 16 bits. Which banks of experts have blocks is decided
by the tensors of the checkpoint: a copy saved without quantization may keep the setting. A method
that quantizes on load gets what this one has read.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.quant.fp4 import MxFp4Format
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import one_expert, pack, pack_experts
from quire.kernels.quantizers.floats import e2m1_table
from quire.quant._e2m1 import (
    BITS,
    CODES_INIT,
    E8M0_BIAS,
    e8m0_to_bfloat16,
    unpack_pairs,
)
from quire.quant.base import Method as QuantMethod
from quire.quant.base import ParamSpec, QuantizableLayer
from quire.weights.mapping import InitSpec

GROUP, BLOCK_BYTES = 32, 16


class Method:
    """e2m1 codes on disk and in memory; or in memory the weights of the next method."""

    name = "mxfp4"
    is_stored = True

    def __init__(self, form: MxFp4Format, then: QuantMethod | None = None) -> None:
        self._form, self._then = form, then

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role == "experts" or not (self._form.only_experts or layer.role == "embedding")

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        codes = ParamSpec(dtype=torch.uint8, inputs_per=2, init=CODES_INIT)
        if self._form.block_axis:
            codes = ParamSpec(
                dtype=torch.uint8, inputs_per=GROUP, trailing=(BLOCK_BYTES,), init=CODES_INIT
            )
        scale = ParamSpec(dtype=torch.uint8, inputs_per=GROUP, init=InitSpec(E8M0_BIAS - 4, 0.0))
        return {self._form.codes: codes, self._form.scale: scale}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            packed = values.pop(self._form.codes)
            codes = WeightCodes(
                q=unpack_pairs(packed.flatten(-2) if self._form.block_axis else packed),
                bits=BITS,
                group=GROUP,
                scale=GroupFactors(e8m0_to_bfloat16(values[self._form.scale])),
                table=e2m1_table(packed.device),
            )
            if self._then is None:
                layer.set_param(matrix, make(codes, dtype))
            else:
                layer.set_param(matrix, _dequantize_experts(codes))
        if self._then is not None:
            self._then.process_after_load(layer, dtype)


def _dequantize_experts(codes: WeightCodes) -> Tensor:
    """The plain matrices [X, O, I], exact in bfloat16; by expert, as float32 takes much memory."""
    out = torch.empty(codes.q.shape, dtype=torch.bfloat16, device=codes.q.device)
    for i, one in enumerate(out):
        one.copy_(one_expert(codes, i).dequantize())
    return out
