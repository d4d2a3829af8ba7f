"""e4m3 weights whose rows of activations stay in 16 bits (W8A16), from a checkpoint.

weight         [O, I] e4m3
weight_scale   [O], [O, 1] or [1]; [O, I / group]; or [O / 128, I / 128], float32
               MXFP8: [O, I / 32] uint8, exponents biased by 127
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.quant.fp8 import Fp8WeightOnlyFormat
from quire.kernels.formats.fp8_weight import E4M3
from quire.kernels.formats.weight_codes import WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant._bit_fields import factors
from quire.quant._e2m1 import E8M0_BIAS, e8m0_to_bfloat16
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.quant.fp8 import DUMMY_WEIGHT_STD, e4m3_codes
from quire.weights.mapping import InitSpec

SCALE = "weight_scale"


class Method:
    """e4m3 weights; activations stay in 16 bits."""

    name = "fp8_weight_only"
    is_stored = True

    def __init__(self, form: Fp8WeightOnlyFormat) -> None:
        self._form = form

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role != "embedding"

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        typical = InitSpec(inputs_of(layer, matrix) ** -0.5 / DUMMY_WEIGHT_STD, 0.0)
        scale = ParamSpec(dtype=torch.float32, inputs_per=self._form.group, init=typical)
        if self._form.group is None:
            scale = replace(scale, broadcastable=True)
        if self._form.powers:
            scale = replace(scale, dtype=torch.uint8, init=InitSpec(E8M0_BIAS - 10, 0.0))
        return {
            "weight": ParamSpec(dtype=E4M3, init=InitSpec(0.0, DUMMY_WEIGHT_STD)),
            SCALE: replace(scale, outputs_per=self._form.rows),
        }

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            layer.set_param(matrix, make(self._codes(layer.take_params(matrix)), dtype))

    def _codes(self, values: dict[str, Tensor]) -> WeightCodes:
        form, scale = self._form, values[SCALE]
        scale = e8m0_to_bfloat16(scale) if form.powers else factors(scale).values
        if form.group is None:
            return e4m3_codes(values["weight"], scale[..., None])
        return e4m3_codes(values["weight"], scale, rows=form.rows, group=form.group)
