"""Weights that bitsandbytes has quantized: NF4, FP4, and LLM.int8() as weights of eight bits.

    bnb_codes  uint8 [O, I]          bnb_scale  float32 [O, I / g], or [O] of eight bits

They are those of quire.weights.bitsandbytes_layout. LLM.int8() multiplies the inputs that exceed
llm_int8_threshold in 16 bits, and rounds all others to 8 bits: here no input is rounded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.quant.bitsandbytes import BLOCK, TABLES, BitsAndBytesFormat
from quire.config.quant.held import LEAST_GROUP
from quire.kernels import linear
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.weights.bitsandbytes_layout import CODES, SCALE
from quire.weights.mapping import InitSpec

log = logging.getLogger(__name__)


class Method:
    """Codes with a table of 16 values, or bytes."""

    name = "bitsandbytes"
    is_stored = True

    def __init__(self, form: BitsAndBytesFormat) -> None:
        self._type = form.type
        if form.type == "int8":
            log.info(
                "LLM.int8() weights are multiplied by unquantized activations: results differ "
                "slightly from those of bitsandbytes, whose activations have 8 bits"
            )

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Every linear layer: tensors show which ones are unquantized."""
        return layer.role in ("linear", "experts", "head")

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        typical = InitSpec(4 * inputs_of(layer, matrix) ** -0.5, 0.0)
        if self._type == "int8":
            codes = ParamSpec(dtype=torch.uint8, init=InitSpec(128.0, 16.0))
            small = InitSpec(typical.mean / 64, 0.0)
            return {
                CODES: codes,
                SCALE: ParamSpec(dtype=torch.float32, inputs_per=None, init=small),
            }
        group = math.gcd(BLOCK, inputs_of(layer, matrix))
        return {
            CODES: ParamSpec(dtype=torch.uint8, init=InitSpec(7.5, 1.2)),
            SCALE: ParamSpec(dtype=torch.float32, inputs_per=group, init=typical),
        }

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        experts = layer.role == "experts"
        for matrix in layer.matrices:
            group = math.gcd(BLOCK, inputs_of(layer, matrix))
            codes = self._codes(layer.take_params(matrix), group)
            if self._type == "int8" or group >= LEAST_GROUP:
                layer.set_param(matrix, (pack_experts if experts else pack)(codes, dtype))
                continue
            plain = codes.dequantize().to(dtype)
            log.warning(
                "a matrix of %d inputs has blocks of %d that cross its rows: it is kept in %s",
                plain.shape[-1], BLOCK, str(dtype).removeprefix("torch."),
            )  # fmt: skip
            layer.set_param(matrix, plain if experts else linear.pack(plain))

    def _codes(self, values: dict[str, Tensor], group: int) -> WeightCodes:
        q, scale = values[CODES], values[SCALE]
        if self._type == "int8":
            factors = GroupFactors(scale[..., None])
            return WeightCodes(q=q, bits=8, group=q.shape[-1], scale=factors, zero=128)
        table = torch.tensor(TABLES[self._type], device=q.device)
        return WeightCodes(q=q, bits=4, group=group, scale=GroupFactors(scale), table=table)
