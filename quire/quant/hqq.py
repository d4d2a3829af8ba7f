"""HQQ weights: codes, and scales and zeros that are floats, as transformers saves them.

    W_q     uint8 [O G / n, g] (3 bits: int32): rows of the matrix [O G, g] of one group each. Field
            f of n, from the highest bits on, is row f * (O G / n) + r; 3 bits pad rows to tens
    scale   [O G, 1], zero [O G, 1]
    nbits, shape, axis, ... : the settings of the layer, each a tensor

    w[o, i] = (q[o, i] - zero[o, i // g]) * scale[o, i // g]

Source: https://github.com/mobiusml/hqq
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from quire.config.quant.hqq import FIELDS_PER_WORD, HqqFormat
from quire.errors import WeightError
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant._bit_fields import factors
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.weights.mapping import RANDOM_BITS, InitSpec

CODES, SCALE, ZERO = "W_q", "scale", "zero"
REQUIRED = {"axis": [1], "quant_scale": [0], "quant_zero": [0]}
"""Settings of a layer -> the only number that is read."""
SETTINGS = (
    *("nbits", "group_size", "shape", "view_as_float", *REQUIRED),
    *("packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


class Method:
    """Integers with float zeros; activations stay in 16 bits."""

    name = "hqq"
    is_stored = True
    merged: ClassVar[Mapping[str, tuple[str, ...]]] = {
        CODES: (CODES, *SETTINGS), SCALE: (SCALE,), ZERO: (ZERO,),
    }  # fmt: skip

    def __init__(self, form: HqqFormat) -> None:
        self._form = form

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role != "embedding"

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        middle, group = 2.0 ** (self._form.bits - 1), self._form.group
        size = inputs_of(layer, matrix) ** -0.5 / middle
        scale = ParamSpec(
            dtype=torch.float32,
            inputs_per=group,
            trailing=(1,) if group is None else (),  # each rank has it
            init=InitSpec(size, 0.0),
        )
        zero = replace(scale, init=InitSpec(middle, 0.3))
        return {CODES: ParamSpec(dtype=torch.uint8, init=RANDOM_BITS), SCALE: scale, ZERO: zero}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            values = layer.take_params(matrix)
            q, scale = values.pop(CODES), values[SCALE]
            codes = WeightCodes(
                q=q & (1 << self._form.bits) - 1,  # dummy bytes have any values
                bits=max(self._form.bits, 2),
                group=self._form.group or q.shape[-1],
                scale=factors(scale),
                offset=GroupFactors(-scale * values[ZERO]),
            )
            layer.set_param(matrix, make(codes, dtype))

    def merge(self, name: str, found: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the codes [O, I], the scales or the zeros [O, G] of one layer."""
        suffix = name.rpartition(".")[2]
        if suffix == CODES:
            return self._codes(name, found, shape)
        if found[suffix].numel() != prod(shape):
            raise WeightError(f"{name} is {list(found[suffix].shape)}; it must have {list(shape)}")
        return found[suffix].reshape(shape)

    def _codes(self, name: str, found: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        outputs, inputs = shape
        bits, group = self._form.bits, self._form.group or inputs
        stated = {key: one.flatten()[:4].tolist() for key, one in found.items() if key != CODES}
        expected = {"nbits": [bits], "group_size": [group], "shape": list(shape), **REQUIRED}
        for key, value in expected.items():
            if stated.get(key, value) != value:
                raise WeightError(
                    f"{name}: the layer's {key} is {stated[key]}; by config.json and the model it "
                    f"is {value}"
                )
        if CODES not in found:
            raise WeightError(f"{name} is missing; the layer has {', '.join(sorted(found))}")
        packed, each = found[CODES], FIELDS_PER_WORD[bits]
        word = torch.int32 if bits == 3 else torch.uint8
        if packed.is_floating_point() and bool(found.get("view_as_float", torch.zeros(1)).any()):
            packed = packed.contiguous().view(word)
        rows = outputs * inputs // group
        if packed.dtype != word or packed.shape != (-(-rows // each), group) or inputs % group:
            raise WeightError(
                f"{name} is {packed.dtype} {list(packed.shape)}; {list(shape)} with {bits} bits in "
                f"groups of {group} is {word} {[-(-rows // each), group]}"
            )
        width = 8 // each if word == torch.uint8 else 3
        shifts = range(width * (each - 1), -1, -width)
        fields = [(packed >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
        return torch.cat(fields)[:rows].reshape(shape)
