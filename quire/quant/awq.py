"""AWQ weights: codes of 4 or 8 bits with a scale and a zero per group of inputs.

gemm    qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales [G, O]
        a word has eight outputs, or four of 8 bits, of which ORDER is where each lies
gemv    qweight int32 [O, I / 8], qzeros int32 [O, w], scales [O, 8 w]
        words have inputs and groups in order; w has room for more groups than there are

    w[o, i] = (q[o, i] - zero[o, i // group]) * scale[o, i // group]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.config.quant.awq import AwqFormat
from quire.quant._bit_fields import unpack_words
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of
from quire.quant.int_words import (
    group_count,
    input_groups,
    names_any,
    set_grouped_weight,
)
from quire.weights.headers import TensorHeader
from quire.weights.mapping import RANDOM_BITS, InitSpec

ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Bits -> output of a word -> its place, counted in codes from the least significant bits."""


class Method:
    """Integers with a scale and a zero per group; activations stay in 16 bits."""

    name = "awq"
    is_stored = True

    def __init__(self, form: AwqFormat, *, zeros: bool = False) -> None:
        """zeros: the checkpoint has them although the format may be without."""
        self._form = form
        self._per_word = 32 // form.bits
        self._has_zeros = zeros or not form.symmetric

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for a layer with or without qzeros."""
        return Method(self._form, zeros=names_any(stored, "qzeros"))

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Linear layers and experts; the head if the configuration states it."""
        return layer.role in ("linear", "experts") or (layer.role == "head" and self._form.head)

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        inputs, group = inputs_of(layer, matrix), self._form.group
        gemm = self._form.layout == "gemm"
        words = self._zero_words(inputs)
        groups = group_count(inputs, group) if gemm else self._per_word * words
        scales = ParamSpec(
            dtype=torch.float32,
            inputs_per=None,
            trailing=(groups,),  # each rank has all of them
            transposed=gemm,
            init=InitSpec(inputs**-0.5 / (1 << self._form.bits - 1), 0.0),
        )
        zeros = ParamSpec(
            dtype=torch.int32,
            outputs_per=self._per_word if gemm else 1,
            inputs_per=None,
            trailing=(groups if gemm else words,),
            transposed=gemm,
            init=RANDOM_BITS,
        )
        weight = ParamSpec(dtype=torch.int32, inputs_per=self._per_word, init=RANDOM_BITS)
        if gemm:
            weight = ParamSpec(
                dtype=torch.int32, outputs_per=self._per_word, transposed=True, init=RANDOM_BITS
            )
        found = {"qweight": weight, "scales": scales}
        return found | {"qzeros": zeros} if self._has_zeros else found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        bits = self._form.bits
        for matrix in layer.matrices:
            mine = layer.stored_layout(matrix)[0].ranges[1]
            values = layer.take_params(matrix)
            words, zeros, scale = values.pop("qweight"), values.get("qzeros"), values["scales"]
            if self._form.layout == "gemm":
                q = unpack_outputs(words, bits)
                zero = None if zeros is None else unpack_outputs(zeros, bits)
            else:
                q = unpack_words(words, bits, len(mine))
                zero = None if zeros is None else unpack_words(zeros, bits, scale.shape[-1])
            groups = input_groups(layer, matrix, self._form.group, q.device)
            set_grouped_weight(
                layer, matrix, dtype, q=q, bits=bits, scale=scale,
                zero=1 << bits - 1 if zero is None else zero,
                groups=groups.expand(q.shape[0], -1, -1) if q.dim() > 2 else groups,
                group=self._form.group,
            )  # fmt: skip

    def _zero_words(self, inputs: int) -> int:
        """Words of the zeros of one output in the layout gemv."""
        group = self._form.group or inputs
        multiple = 1 if group >= 128 else 2 if group == 64 else 4
        words = -(-group_count(inputs, group) // self._per_word)
        return -(-words // multiple) * multiple


def unpack_outputs(words: Tensor, bits: int) -> Tensor:
    """int32 [..., O * bits / 32, n] -> uint8 [..., O, n], in the order of outputs."""
    count = words.shape[-1]
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (count, 4))
    shape = (*words.shape[:-1], 32 // bits, count)
    out = torch.empty(shape, dtype=torch.uint8, device=words.device)
    planes = [octets[..., i].contiguous() for i in range(4)]  # of 32 bits only one has a field
    for output, place in enumerate(ORDER[bits]):
        at = bits * place
        torch.bitwise_right_shift(planes[at // 8], at % 8, out=out[..., output, :])
        out[..., output, :] &= (1 << bits) - 1
    return out.flatten(-3, -2)
