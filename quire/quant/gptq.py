"""GPTQ weights: codes packed along the inputs, zeros along the outputs, any order of groups.

    qweight  int32 [I * bits / 32, O]      qzeros  int32 [G, O * bits / 32]
    scales   [G, O]                        g_idx   int32 [I], the group of each input

    w[o, i] = (q[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]

Checkpoints in which all zeros are in the middle may be without qzeros, and those with inputs in
order without g_idx. The version of the zeros is often stated wrong: where they are all in the
middle, the words themselves decide.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from quire.config.quant.gptq import GptqFormat
from quire.quant._bit_fields import unpack_words
from quire.quant.base import ParamSpec, QuantizableLayer, Step, inputs_of
from quire.quant.int_words import (
    group_count,
    input_groups,
    names_any,
    set_grouped_weight,
)
from quire.weights.headers import TensorHeader
from quire.weights.mapping import RANDOM_BITS, InitSpec

log = logging.getLogger(__name__)


class Method:
    """Integers with a scale and a zero per group; activations stay in 16 bits."""

    name = "gptq"
    is_stored = True

    def __init__(self, form: GptqFormat, optional: Collection[str] = ()) -> None:
        """optional: the parameters that the checkpoint has of those that it may be without."""
        self._form = form
        self._has_zeros = not form.symmetric or "qzeros" in optional
        self._has_g_idx = "g_idx" in optional

    def adapted(
        self, layer: QuantizableLayer, stored: Mapping[str, Sequence[TensorHeader]]
    ) -> Method:
        """Return the method for a layer with or without qzeros and g_idx."""
        return Method(self._form, [one for one in ("qzeros", "g_idx") if names_any(stored, one)])

    def accepts(self, layer: QuantizableLayer) -> bool:
        """Linear layers and experts; the head if the configuration states it."""
        return layer.role in ("linear", "experts") or (layer.role == "head" and self._form.head)

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        inputs, bits = inputs_of(layer, matrix), self._form.bits
        per: Step = Fraction(32, bits) if 32 % bits else 32 // bits
        groups = (group_count(inputs, self._form.group),)  # each rank has all of them
        typical = InitSpec(inputs**-0.5 / 2 ** (bits - 1), 0.0)
        words = ParamSpec(dtype=torch.int32, inputs_per=per, transposed=True, init=RANDOM_BITS)
        scales = replace(words, dtype=torch.float32, inputs_per=None, trailing=groups, init=typical)
        found = {"qweight": words, "scales": scales}
        if self._has_zeros:
            found["qzeros"] = replace(
                scales, dtype=torch.int32, outputs_per=per, init=InitSpec(0.0, 0.0)
            )
        if self._has_g_idx:
            found["g_idx"] = ParamSpec(dtype=torch.int32, outputs_per=None)
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        for matrix in layer.matrices:
            mine = layer.stored_layout(matrix)[0].ranges[1]
            values = layer.take_params(matrix)
            q = unpack_words(values.pop("qweight"), self._form.bits, len(mine))
            if (groups := values.get("g_idx")) is None:
                groups = input_groups(layer, matrix, self._form.group, q.device)
            else:
                groups = groups.long().unflatten(-1, (-1, len(mine)))  # [..., parts, I]
            if groups.dim() < q.dim():
                groups = groups.expand(q.shape[0], -1, -1)
            set_grouped_weight(
                layer, matrix, dtype, q=q, bits=self._form.bits, scale=values["scales"],
                zero=self._zero(values.get("qzeros"), q.shape[-2]), groups=groups,
                group=self._form.group, shuffled=self._form.act_order and self._has_g_idx,
            )  # fmt: skip

    def _zero(self, words: Tensor | None, outputs: int) -> int | Tensor:
        """The code of zero: one for all, or uint8 [..., O, G]. words: [..., O * bits / 32, G]."""
        bits, offset = self._form.bits, self._form.zero_offset
        middle = 1 << (bits - 1)
        if words is None or (words.is_meta and self._form.symmetric):
            return middle
        stored = unpack_words(words.transpose(-1, -2), bits, outputs).transpose(-1, -2)
        if self._form.symmetric:
            least, most = (int(one) for one in stored.aminmax())
            if least == most and least in (middle - 1, middle):
                return middle
            log.warning(
                "config.json: quantization_config.sym is true, but stored zeros are from %d to %d; "
                "they are used as checkpoint_format states them",
                least,
                most,
            )
        return stored + offset & (1 << bits) - 1
