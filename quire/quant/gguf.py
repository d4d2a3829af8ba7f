"""Weights in the blocks of GGUF files: one method per ggml type.

    ggml        uint8 [O, B, bytes]  B blocks of each row; what they mean: quire.quant.ggml_blocks
    ggml_scale  float32 [O] or [1]   NVFP4: blocks are multiplied by it

Blocks are cut by ranks along O, and along I between two of them. Types without codes are widened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.quant.ggml import TYPE_BY_NAME, GgmlFormat
from quire.kernels import linear
from quire.kernels.formats.weight_codes import GroupFactors
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant.base import ParamSpec, QuantizableLayer
from quire.quant.ggml_blocks import dequantize, has_codes, unpack
from quire.weights.gguf.tensors import BLOCKS, SCALE, SCALED
from quire.weights.mapping import InitSpec

log = logging.getLogger(__name__)

DUMMY_BYTE = InitSpec(24.0, 4.0)
"""Of dummy values: float16 scales of such bytes are small."""


class Method:
    """Blocks of one type."""

    name = "gguf"
    is_stored = True

    def __init__(self, form: GgmlFormat) -> None:
        self._kind = TYPE_BY_NAME[form.type]

    def accepts(self, layer: QuantizableLayer) -> bool:
        return True

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        blocks = ParamSpec(
            dtype=torch.uint8,
            inputs_per=self._kind.values,
            trailing=(self._kind.nbytes,),
            init=DUMMY_BYTE,
        )
        if self._kind.name != SCALED:
            return {BLOCKS: blocks}
        scale = ParamSpec(
            dtype=torch.float32, inputs_per=None, broadcastable=True, init=InitSpec(1.0, 0.0)
        )
        return {BLOCKS: blocks, SCALE: scale}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            blocks = values.pop(BLOCKS)
            experts = layer.role == "experts"
            if has_codes(self._kind.name):
                codes = unpack(self._kind.name, blocks)
                if SCALE in values:
                    assert codes.scale is not None
                    whole = values[SCALE][..., None]
                    codes = replace(codes, scale=GroupFactors(whole, codes.scale.codes))
                layer.set_param(matrix, (pack_experts if experts else pack)(codes, dtype))
                continue
            plain = self._widen(blocks, dtype)
            if experts or not layer.multiplied:
                layer.set_param(matrix, plain)
            else:
                layer.set_param(matrix, linear.pack(plain))

    def _widen(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        plain = dequantize(self._kind.name, blocks).to(dtype)
        log.warning(
            "no kernel multiplies %s: a weight %s is widened to %s, from %d to %d bytes",
            *(self._kind.name, list(plain.shape), str(dtype).removeprefix("torch.")),
            *(blocks.nbytes, plain.nbytes),
        )
        return plain
