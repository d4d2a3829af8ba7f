"""Weights in signed bytes that multiply rows in bytes (W8A8), from a checkpoint.

    weight             [O, I] int8
    weight_scale       [O], [O, 1] or [1]
    input_scale        [1], where the checkpoint fixed the scale of activations
    input_zero_point   [1], where it fixed their zero too
    weight_zero_point  [O] or [1], zeros (Quark); input_zero_point may be so, too

Parts of a fused layer have one input, so one range of it: that which holds the range of each.
On a GPU experts multiply activations of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.quant.int8 import Int8Format
from quire.errors import WeightError
from quire.kernels import grouped_linear
from quire.kernels.formats.int8_weight import Int8ExpertWeights, Int8Weight, sum_inputs
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.int8_linear import pack, pack_experts
from quire.kernels.quantize_int8 import INT8_MAX, INT8_MIN
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.quant.int_words import names_any
from quire.weights.headers import TensorHeader
from quire.weights.mapping import InitSpec

INPUT_SCALE, INPUT_ZERO, WEIGHT_ZERO = "input_scale", "input_zero_point", "weight_zero_point"
DUMMY_WEIGHT_STD = 32.0


class Method:
    """int8 weights, int8 activations, integer sums."""

    name = "int8"
    is_stored = True

    def __init__(self, form: Int8Format, *, extra_zeros: tuple[str, ...] = ()) -> None:
        """extra_zeros: tensors of the checkpoint that must be all zero."""
        self._form = form
        self._extra_zeros = extra_zeros

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role != "embedding"

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for a layer with or without zero points that are zero."""
        if not self._form.extra_zeros:
            return self
        given = [WEIGHT_ZERO, *([INPUT_ZERO] if self._form.symmetric_inputs else [])]
        return Method(self._form, extra_zeros=tuple(one for one in given if names_any(stored, one)))

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        typical = InitSpec(inputs_of(layer, matrix) ** -0.5 / DUMMY_WEIGHT_STD, 0.0)
        scale = ParamSpec(dtype=torch.float32, inputs_per=None, broadcastable=True, init=typical)
        found = {
            "weight": ParamSpec(dtype=torch.int8, init=InitSpec(0.0, DUMMY_WEIGHT_STD)),
            "weight_scale": scale,
        }
        if self._form.static_activations:
            one = replace(scale, outputs_per=None, of_activations=True, init=InitSpec(0.03, 0.0))
            found[INPUT_SCALE] = one
            if not self._form.symmetric_inputs:
                found[INPUT_ZERO] = replace(one, dtype=torch.int8, init=InitSpec(0.0, 0.0))
        zero = replace(scale, dtype=torch.int8, init=InitSpec(0.0, 0.0))
        for name in self._extra_zeros:
            found[name] = zero if name == WEIGHT_ZERO else replace(zero, outputs_per=None)
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        experts = layer.role == "experts"
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            data = values["weight"]
            for name in self._extra_zeros:
                zeros = values.pop(name)
                if not zeros.is_meta and bool(zeros.any()):
                    raise WeightError(f"{name} is not zero, but the format states none")
            scale, zero = _input_range(values.get(INPUT_SCALE), values.get(INPUT_ZERO))
            made = (Int8ExpertWeights if experts else Int8Weight)(
                data=data,
                scale=values["weight_scale"],
                sums=None if self._form.symmetric_inputs else sum_inputs(data),
                input_scale=scale,
                input_zero_point=zero,
            )
            if isinstance(made, Int8Weight):
                layer.set_param(matrix, pack(made, dtype))
            elif data.is_cpu:
                layer.set_param(matrix, pack_experts(made, dtype))
            else:
                layer.set_param(matrix, grouped_linear.pack_experts(to_codes(made), dtype))


def to_codes(bank: Int8ExpertWeights) -> WeightCodes:
    """The same weights for activations of 16 bits: banks in bytes have kernels for those alone."""
    return WeightCodes(
        q=bank.data.view(torch.uint8) ^ 128,
        bits=8,
        group=bank.data.shape[-1],
        scale=GroupFactors(bank.scale[..., None]),
        zero=128,
    )


def _input_range(scale: Tensor | None, zero: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The scale [1] and zero [1] of activations that suit all parts."""
    if scale is None:
        return None, None
    if zero is None:
        return scale.amax().view(1), None
    low = (scale * (INT8_MIN - zero.float())).amin()
    high = (scale * (INT8_MAX - zero.float())).amax()
    shared = (high - low) / (INT8_MAX - INT8_MIN)
    return shared.view(1), (INT8_MIN - low / shared).round().int().view(1)
