"""NVFP4: e2m1 codes, an e4m3 scale per 16 inputs, and one float32 scale per tensor.

    weight_packed         [O, I / 2] uint8, the even input in the low half
    weight_scale          [O, I / 16] e4m3
    weight_global_scale   [1] float32; ModelOpt: weight_scale_2, which multiplies

    w = e2m1 * weight_scale / weight_global_scale            (divided)

Stored as it is on disk; activations stay in 16 bits. So a scale of activations is not used.

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.quant.fp4 import NvFp4Format
from quire.errors import WeightError
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.kernels.quantizers.floats import e2m1_table
from quire.quant._e2m1 import BITS, CODES_INIT, unpack_pairs
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.weights.mapping import InitSpec

GROUP = 16
SCALE = "weight_scale"
TYPICAL = 2.0
"""Typical magnitude of e2m1 numbers."""


class Method:
    """e2m1 codes on disk and in memory."""

    name = "nvfp4"
    is_stored = True

    def __init__(self, form: NvFp4Format) -> None:
        self._form = form

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role != "embedding"

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        form, size = self._form, inputs_of(layer, matrix) ** -0.5 / TYPICAL
        whole = InitSpec(1 / size if form.divides else size, 0.0)
        found = {
            form.codes: ParamSpec(dtype=torch.uint8, inputs_per=2, init=CODES_INIT),
            SCALE: ParamSpec(dtype=torch.float8_e4m3fn, inputs_per=GROUP, init=InitSpec(1.0, 0.0)),
            form.global_scale: ParamSpec(
                dtype=torch.float32, inputs_per=None, broadcastable=True, init=whole
            ),
        }
        if form.input_scale is not None:
            found[form.input_scale] = ParamSpec(
                dtype=torch.float32, outputs_per=None, inputs_per=None, broadcastable=True,
                init=InitSpec(1.0, 0.0),
            )  # fmt: skip
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            whole = self._whole(values[self._form.global_scale])
            codes = WeightCodes(
                q=unpack_pairs(values.pop(self._form.codes)),
                bits=BITS,
                group=GROUP,
                scale=GroupFactors(whole[..., None], values[SCALE]),
                table=e2m1_table(whole.device),
            )
            layer.set_param(matrix, make(codes, dtype))

    def _whole(self, scale: Tensor) -> Tensor:
        """The factor of a whole tensor, for each output."""
        if not scale.is_meta and not bool(((scale > 0) & scale.isfinite()).all()):
            raise WeightError(
                f"{self._form.global_scale} has values from {float(scale.amin())} to "
                f"{float(scale.amax())}; a scale is a positive number"
            )
        return 1.0 / scale if self._form.divides else scale
