"""Weights of a plain checkpoint in a few bits, quantized when the last tensor of a layer has come.

The original is freed before the next layer, so the peak is the quantized model plus one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.quant.facts import MIN_OUTPUTS
from quire.config.quant.ggml_mixes import fitting_type
from quire.config.quant.ggml_online import GgmlOnlineFormat
from quire.config.quant.online import OnlineFormat
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.grouped_linear import pack, pack_experts
from quire.kernels.quantizers.floats import quantize_mxfp4
from quire.kernels.quantizers.ggml import quantize_ggml
from quire.kernels.quantizers.integers import quantize_integers
from quire.kernels.quantizers.nf4 import quantize_nf4
from quire.quant.base import ParamSpec, QuantizableLayer, outputs_of

SCALE_DTYPE = torch.bfloat16
"""It has the range of the weights, and codes are chosen for the rounded scale."""


class Method:
    """Codes with a scale per group; activations stay in the model's dtype."""

    name = "online"
    is_stored = False

    def __init__(self, form: OnlineFormat | GgmlOnlineFormat) -> None:
        self._form = form

    def accepts(self, layer: QuantizableLayer) -> bool:
        """No gate of few outputs. A head, and an embedding that it shares, only if asked for."""
        widths = {layer.weight_layout(one)[0].shard_shape[1] for one in layer.matrices}
        return (
            (layer.role == "experts" or not self._form.only_experts)
            and outputs_of(layer) >= MIN_OUTPUTS
            and all(self._form.group_of(width) for width in widths)
        )

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec()}

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = pack_experts if layer.role == "experts" else pack
        for matrix in layer.matrices:
            codes = quantize(layer.take_params(matrix).pop("weight"), self._form)
            layer.set_param(matrix, make(codes, dtype))


def quantize(weight: Tensor, form: OnlineFormat | GgmlOnlineFormat) -> WeightCodes:
    """Quantize a weight [O, I], or weights [X, O, I], to a format that their width allows."""
    if weight.is_meta:  # of a step that is only described: layers of one shape have equal codes
        return _meta_codes(tuple(weight.shape), weight.dtype, form)
    return _quantize(weight, form)


@functools.cache
def _meta_codes(
    shape: tuple[int, ...], dtype: torch.dtype, form: OnlineFormat | GgmlOnlineFormat
) -> WeightCodes:
    return _quantize(torch.empty(shape, dtype=dtype, device="meta"), form)


def _quantize(weight: Tensor, form: OnlineFormat | GgmlOnlineFormat) -> WeightCodes:
    group = form.group_of(weight.shape[-1])
    assert group is not None, "refused by `accepts`"
    flat = weight.flatten(0, -2)
    if isinstance(form, GgmlOnlineFormat):
        kind = fitting_type(form.type, weight.shape[-1])
        assert kind is not None, "refused by `accepts`"
        codes = quantize_ggml(kind, flat)
    elif form.values == "nf4":
        codes = quantize_nf4(flat, group)
    elif form.values == "mxfp4":
        codes = quantize_mxfp4(flat)
        assert codes.scale is not None
        codes = replace(codes, scale=GroupFactors(codes.scale.values.to(SCALE_DTYPE)))
    else:
        codes = quantize_integers(
            flat, bits=form.bits, group=group, symmetric=form.symmetric, scale_dtype=SCALE_DTYPE
        )
    return codes if weight.dim() == 2 else _as_bank(codes, weight.shape[0])


def _as_bank(codes: WeightCodes, experts: int) -> WeightCodes:
    """Codes of the rows of all experts -> [X, O, I]."""

    def cut(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (experts, -1))

    def cut_factors(factors: GroupFactors | None) -> GroupFactors | None:
        return None if factors is None else GroupFactors(*map(cut, factors.tensors))

    return replace(
        codes,
        q=cut(codes.q),
        scale=cut_factors(codes.scale),
        offset=cut_factors(codes.offset),
        zero=cut(codes.zero) if isinstance(codes.zero, Tensor) else codes.zero,
    )
