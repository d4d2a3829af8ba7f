"""Integers of two to eight bits from compressed-tensors: packed fields, or one int8 each.

    pack-quantized   weight_packed [O, ceil(I * bits / 32)] int32, along I; weight_shape [2]
                     weight_zero_point [ceil(O * bits / 32), G] int32, along O
    int-quantized    weight [O, I] int8; weight_zero_point [O, G] int8
    both             weight_scale [O, G], [O, 1] or [1]; weight_g_idx [I] with actorder "group"

Fields hold the integer plus 2 ** (bits - 1). Where 32 is no multiple of the bits, files before 2026
leave the rest of a word unused and newer ones do not: the width shows which.

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.config.quant.compressed_tensors import PackedIntFormat
from quire.errors import ConfigError, WeightError
from quire.kernels.formats.weight_codes import WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.quant._bit_fields import factors, fields_per_word, unpack_rows, unpack_words
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.quant.int_words import group_count, set_grouped_weight
from quire.weights.headers import TensorHeader
from quire.weights.mapping import InitSpec

PACKED, SCALE, ZERO = "weight_packed", "weight_scale", "weight_zero_point"
SHAPE, GROUP_OF_INPUT = "weight_shape", "weight_g_idx"
CODE_BITS = {7: 8}
"""Bits of codes whose own number of bits no kernel has."""


class Method:
    """Integers on disk and in memory; activations stay in 16 bits."""

    name = "compressed_tensors"
    is_stored = True

    def __init__(self, form: PackedIntFormat) -> None:
        self._form = form
        self._variant = _Variant()

    def accepts(self, layer: QuantizableLayer) -> bool:
        return layer.role != "embedding"

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for words that are dense or padded."""
        variant = _Variant()
        for matrix in layer.matrices if self._form.packed else ():
            inputs = inputs_of(layer, matrix)
            name = PACKED if matrix == "weight" else f"{matrix}_{PACKED}"
            widths = {header.shape[-1] for header in stored.get(name, ()) if header.shape}
            allowed = {
                dense: -(-inputs // fields_per_word(self._form.bits, dense))
                for dense in (True, False)
            }
            if not widths <= set(allowed.values()):
                raise WeightError(
                    f"{name} has {sorted(widths)} words a row; {inputs} inputs of "
                    f"{self._form.bits} bits are {allowed[True]}, or {allowed[False]} padded"
                )
            if widths and allowed[True] not in widths:
                variant = replace(variant, dense=False)
        found = Method(self._form)
        found._variant = variant
        return found

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        form, per = self._form, fields_per_word(self._form.bits, self._variant.dense)
        typical = InitSpec(inputs_of(layer, matrix) ** -0.5 / 2 ** (form.bits - 1), 0.0)
        words, codes = InitSpec(0.0, 2.0**29), InitSpec(0.0, 2.0 ** (form.bits - 1) / 6)
        scale = ParamSpec(dtype=torch.float32, inputs_per=form.group, init=typical)
        if form.group is None:
            scale = replace(scale, broadcastable=True)
        elif form.by_activation:  # each rank has all of them: its inputs may be of any groups
            groups = group_count(inputs_of(layer, matrix), form.group)
            scale = replace(scale, inputs_per=None, trailing=(groups,))
        zero = replace(scale, dtype=torch.int8, init=InitSpec(0.0, 0.0))
        if form.packed:
            found = {
                PACKED: ParamSpec(dtype=torch.int32, inputs_per=per, init=words),
                SHAPE: ParamSpec(
                    dtype=torch.int64, outputs_per=None, inputs_per=None, trailing=(2,),
                    init=InitSpec(0.0, 0.0),
                ),
            }  # fmt: skip
            if not form.per_tensor:
                zero = replace(
                    scale, dtype=torch.int32, outputs_per=per, broadcastable=False, init=words,
                    trailing=(1,) if form.group is None else scale.trailing,
                )  # fmt: skip
        else:
            found = {"weight": ParamSpec(dtype=torch.int8, init=codes)}
        found[SCALE] = scale
        if not form.symmetric:
            found[ZERO] = zero
        if form.by_activation:
            found[GROUP_OF_INPUT] = ParamSpec(
                dtype=torch.int32, outputs_per=None, init=InitSpec(0.0, 0.0)
            )
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            values, shard = layer.take_params(matrix), layer.stored_layout(matrix)[0]
            codes = self._codes(layer, matrix, values)
            if self._form.by_activation and len(shard.ranges[1]) < shard.shape[1]:
                self._set_cut_groups(layer, matrix, dtype, codes, values[GROUP_OF_INPUT])
            else:
                layer.set_param(matrix, make(codes, dtype))

    def _codes(
        self, layer: QuantizableLayer, matrix: str, values: dict[str, Tensor]
    ) -> WeightCodes:
        form, layout = self._form, layer.stored_layout(matrix)
        inputs = len(layout[0].ranges[1])
        if form.packed:
            _check_shapes(values.pop(SHAPE), [part.shape for part in layout])
            q = unpack_words(values.pop(PACKED), form.bits, inputs, dense=self._variant.dense)
        else:
            q = self._unsigned(values.pop("weight"))
        scale = values[SCALE]
        scale = scale if form.group is not None else scale[..., None]
        codes = WeightCodes(
            q=q, bits=CODE_BITS.get(form.bits, form.bits), group=form.group or inputs,
            scale=factors(scale), zero=self._zero(values, q.shape[-2]),
        )  # fmt: skip
        if not form.by_activation:
            return codes
        if q.dim() == 3:
            raise ConfigError(
                f"{GROUP_OF_INPUT}: inputs in the order of activations are supported in linear "
                "layers, not in experts"
            )
        if inputs < layout[0].shape[1]:
            return codes
        return _in_group_order(codes, values[GROUP_OF_INPUT], len(layout))

    def _set_cut_groups(
        self,
        layer: QuantizableLayer,
        matrix: str,
        dtype: torch.dtype,
        codes: WeightCodes,
        groups: Tensor,
    ) -> None:
        """Set a matrix of which this rank has some inputs. groups: int32 [I], the group of each."""
        assert codes.scale is not None
        set_grouped_weight(
            layer, matrix, dtype, q=codes.q, bits=codes.bits, scale=codes.scale.values.float(),
            zero=codes.zero, groups=groups.long()[None], group=codes.group, shuffled=True,
        )  # fmt: skip

    def _zero(self, values: dict[str, Tensor], outputs: int) -> int | Tensor:
        form = self._form
        if form.symmetric:
            return 1 << form.bits - 1
        zero = values[ZERO]
        if form.packed and not form.per_tensor:
            return unpack_rows(zero, form.bits, outputs, dense=self._variant.dense).contiguous()
        zero = self._unsigned(zero)
        return zero if form.group is not None else zero[..., None]

    def _unsigned(self, values: Tensor) -> Tensor:
        """int8 to uint8 codes, as packed fields are. Raises WeightError for too large ones."""
        half = 1 << self._form.bits - 1
        codes = values.short() + half
        if not values.is_meta and bool(((codes < 0) | (codes >= 2 * half)).any()):
            raise WeightError(
                f"integers of {self._form.bits} bits go from {-half} to {half - 1}; "
                f"found {int(values.amin())} to {int(values.amax())}"
            )
        return codes.to(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Variant:
    dense: bool = True


def _check_shapes(stated: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise WeightError unless each tensor states its part's shape. Zeros: dummy values.

    A tensor that the checkpoint has for all parts, and ranks cut, states the shape of all.
    """
    if stated.is_meta:
        return
    fused = [sum(outputs for outputs, _ in shapes), shapes[0][1]]
    for found, shape in zip(stated.view(-1, 2).tolist(), shapes, strict=True):
        if found not in ([0, 0], list(shape), fused):
            raise WeightError(f"{SHAPE} states {found} for a weight of {list(shape)}")


def _in_group_order(codes: WeightCodes, groups: Tensor, parts: int) -> WeightCodes:
    """Sort inputs by their groups. groups: int32 [parts * I], the group of each input."""
    inputs, sizes = codes.q.shape[-1], codes.group
    if groups.is_meta:
        return codes
    each = groups.view(parts, inputs)
    perm = each[0].argsort(stable=True)
    order = torch.arange(inputs, device=groups.device) // sizes
    if bool((each != each[0]).any()) or not torch.equal(each[0][perm].long(), order):
        if not bool(groups.any()):
            return codes  # dummy values
        raise WeightError(
            f"{GROUP_OF_INPUT} must have {sizes} inputs in each group, the same in all parts of a "
            "fused layer"
        )
    return replace(codes, q=codes.q[:, perm], perm=perm.int())
