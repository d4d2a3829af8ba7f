"""FP8 method: e4m3 weights with float32 scales, from a checkpoint or quantized on load.

On load a layer is quantized when its last tensor has arrived, and its original is freed, so the
peak is the quantized model plus one layer. A checkpoint's scales are parameters that it must fill:
one per tensor (held as one per output, so that fused parts keep their own), per output, or per
block.

A GPU below compute capability 8.9 has no FP8 products: there the same numbers are decoded in
registers (`e4m3_codes`), and rows stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.quant.facts import MIN_OUTPUTS
from quire.config.quant.fp8 import Fp8Format
from quire.kernels.formats.fp8_weight import (
    BLOCK_SIZE,
    E4M3,
    Fp8ExpertWeights,
    Fp8Weight,
    quantize_blocks,
    quantize_channels,
)
from quire.kernels.formats.weight import StoredExperts, StoredWeight
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes, e4m3_table
from quire.kernels.gpu.runtime.target import gpu_target
from quire.kernels.grouped_linear import pack, pack_experts
from quire.kernels.quantize_fp8 import quantize_fp8
from quire.quant.base import ParamSpec, QuantizableLayer, inputs_of, outputs_of
from quire.weights.mapping import InitSpec

INPUT_SCALE = "input_scale"
DUMMY_WEIGHT_STD = 64.0
"""Spread of dummy weights in e4m3: six of it stay below 448, where numbers end."""

CHUNK_ELEMENTS = 1 << 24
"""Elements quantized at once: blocks are found in float32, which is twice or four times as wide."""


class Method:
    """e4m3 weights, e4m3 activations, float32 sums."""

    name = "fp8"

    def __init__(self, form: Fp8Format) -> None:
        self._form = form
        self.is_stored = form.is_stored

    def accepts(self, layer: QuantizableLayer) -> bool:
        """All but embeddings and gates of few outputs; on load not the head, whose errors matter
        most."""
        roles = ("linear", "experts", *(("head",) if self.is_stored else ()))
        return layer.role in roles and outputs_of(layer) >= MIN_OUTPUTS

    def params(self, layer: QuantizableLayer, matrix: str) -> Mapping[str, ParamSpec]:
        """The weight, and from a checkpoint its scales: [1], [O] or [O / 128, I / 128] of a
        part."""
        if not self._form.is_stored:
            return {"weight": ParamSpec()}
        typical = InitSpec(inputs_of(layer, matrix) ** -0.5 / DUMMY_WEIGHT_STD, 0.0)
        scale = ParamSpec(dtype=torch.float32, inputs_per=None, broadcastable=True, init=typical)
        if block := self._form.block:
            scale = replace(scale, outputs_per=block, inputs_per=block, broadcastable=False)
        found = {
            "weight": ParamSpec(dtype=E4M3, init=InitSpec(0.0, DUMMY_WEIGHT_STD)),
            self._form.scale: scale,
        }
        if self._form.static_activations:
            found[INPUT_SCALE] = replace(
                scale, outputs_per=None, of_activations=True, init=InitSpec(0.01, 0.0)
            )
        return found

    def process_after_load(self, layer: QuantizableLayer, dtype: torch.dtype) -> None:
        make = self._make_experts if layer.role == "experts" else self._make_weight
        for matrix in layer.matrices:
            made = make(layer.take_params(matrix))
            if not has_products(made.data.device):
                layer.set_param(matrix, _for_16_bit_rows(made, dtype))
            elif isinstance(made, Fp8Weight):
                layer.set_param(matrix, _with_kernel_buffers(made))
            else:
                layer.set_param(matrix, made)

    def _make_weight(self, values: dict[str, Tensor]) -> Fp8Weight:
        data = values.pop("weight")
        if not self._form.is_stored:
            return quantize(data, self._form.block)
        return Fp8Weight(data, values[self._form.scale], _largest(values.get(INPUT_SCALE)))

    def _make_experts(self, values: dict[str, Tensor]) -> Fp8ExpertWeights:
        data = values.pop("weight")
        if not self._form.is_stored:
            return quantize_experts(data, self._form.block)
        return Fp8ExpertWeights(data, values[self._form.scale], _largest(values.get(INPUT_SCALE)))


def _largest(scales: Tensor | None) -> Tensor | None:
    """Return the scale of activations that suits all parts."""
    return None if scales is None else scales.amax().view(1)


def has_products(device: torch.device) -> bool:
    """Whether a device multiplies e4m3 numbers: a CPU by the reference, and GPUs from Ada on."""
    return not (0, 0) < gpu_target(device).capability < (8, 9)


def _for_16_bit_rows(
    weight: Fp8Weight | Fp8ExpertWeights, dtype: torch.dtype
) -> StoredWeight | StoredExperts:
    """The same numbers for kernels that decode them, and multiply rows of a dtype."""
    scale, block = weight.scale, weight.block_size
    scale = scale if block else scale[..., None]
    codes = e4m3_codes(weight.data, scale, rows=block or 1, group=block)
    return (pack if isinstance(weight, Fp8Weight) else pack_experts)(codes, dtype)


def e4m3_codes(data: Tensor, scale: Tensor, *, rows: int = 1, group: int = 0) -> WeightCodes:
    """Return e4m3 numbers [..., O, I] and their scales as codes.

    scale: [..., O / rows, I / group] of any float dtype; group 0: one for all inputs.
    """
    outputs, inputs = data.shape[-2:]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., :outputs, :]
    return WeightCodes(
        q=data.view(torch.uint8), bits=8, group=group or inputs,
        scale=GroupFactors(scale), table=e4m3_table(data.device), e4m3=True,
    )  # fmt: skip


def _with_kernel_buffers(weight: Fp8Weight) -> Fp8Weight:
    """Add the buffers that the kernels of its device need."""
    if weight.device.type == "cpu":
        return weight
    bands, device = -(-weight.shape[0] // 16), weight.device
    tickets = torch.zeros(bands, dtype=torch.int32, device=device)
    return replace(weight, counters=tickets, unit_scale=torch.ones(1, device=device))


def quantize(weight: Tensor, block: int) -> Fp8Weight:
    """Quantize a weight [O, I] to eight bits, a stripe of rows at a time."""
    outputs, inputs = weight.shape
    step = max(CHUNK_ELEMENTS // inputs // BLOCK_SIZE, 1) * BLOCK_SIZE
    data = torch.empty(outputs, inputs, dtype=E4M3, device=weight.device)
    scales = []
    for at in range(0, outputs, step):
        stripe = weight[at : at + step]
        if block or not has_products(weight.device):
            quantized = quantize_blocks(stripe) if block else quantize_channels(stripe)
            data[at : at + step], scale = quantized.data, quantized.scale
        else:
            data[at : at + step], scale = quantize_fp8(
                stripe
            )  # an output is quantized like a token's row
        scales.append(scale)
    return Fp8Weight(data, torch.cat(scales))


def quantize_experts(bank: Tensor, block: int) -> Fp8ExpertWeights:
    """Quantize weights of experts [X, O, I] to eight bits."""
    ones = [quantize(one, block) for one in bank]
    return Fp8ExpertWeights(
        torch.stack([one.data for one in ones]), torch.stack([one.scale for one in ones])
    )
