"""x @ weight.T + bias over a weight in bytes: rows of x are quantized first (quantize_int8).

    y[t, o] = s[t] * scale[o] * (sum_i q[t, i] * data[o, i] - zero[t] * sums[o]) + bias[o]

The sums are those of integers, so their order changes nothing; they become float32, are multiplied
by s[t], then by scale[o], and y is rounded to the dtype of x once. How many rows the step has
changes nothing either. Layouts of a device's kernels are made by `pack`.

Axes: T tokens in the step, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.int8_weight import (
    Int8ExpertWeights,
    Int8Weight,
    quantize_outputs,
    sum_inputs,
)
from quire.kernels.formats.panel_int8 import PanelInt8, pack_panel_int8
from quire.kernels.formats.separate_experts import SeparateExperts
from quire.kernels.formats.weight import StoredExperts, StoredWeight, kernel_for
from quire.kernels.framework.op import op
from quire.kernels.native.library import (
    DTYPES,
    INT8_LINEAR,
    NativeOp,
    address_of,
    available,
    empty_product,
)
from quire.kernels.quantize_int8 import quantize_int8

EXACT_INPUTS = 1024
"""Products of bytes whose sum is exact in float32: 1024 * 128 * 128 is 2^24."""


def pack(weight: Int8Weight, dtype: torch.dtype) -> Int8Weight | PanelInt8:
    """Return the weight as the kernels of its device multiply it by rows of a dtype."""
    return pack_panel_int8(weight) if _is_native(weight.data, dtype) else weight


def pack_experts(bank: Int8ExpertWeights, dtype: torch.dtype) -> StoredExperts:
    """The same of weights [X, O, I]."""
    if not _is_native(bank.data, dtype):
        return bank
    return SeparateExperts(tuple(pack_panel_int8(bank[i]) for i in range(len(bank))))


def _is_native(data: Tensor, dtype: torch.dtype) -> bool:
    return data.is_cpu and dtype in DTYPES and available()


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for t, i, o, dtype in [
        (1, 128, 64, torch.bfloat16),
        (7, 256, 384, torch.bfloat16),
        (3, 101, 70, torch.float32),
        (33, 2080, 200, torch.bfloat16),
        (70, 256, 512, torch.float16),
    ]:
        x = (torch.randn(t, i, device=device) + 0.5).to(dtype)
        bias = torch.randn(o, device=device).to(dtype)
        for weight in random_weights(o, i, device):
            for packed in dict.fromkeys((weight, pack(weight, dtype))):
                yield {"x": x, "weight": packed}
                yield {"x": x, "weight": packed, "bias": bias}


def random_weights(outputs: int, inputs: int, device: torch.device) -> Iterator[Int8Weight]:
    """Weights of each kind: rows of x symmetric or not, of their own scales or of a fixed one."""
    base = quantize_outputs(torch.randn(outputs, inputs, device=device) / inputs**0.5)
    static = torch.full((1,), 0.03, device=device)
    zero = torch.full((1,), -20, dtype=torch.int32, device=device)
    sums = sum_inputs(base.data)
    yield base
    yield replace(base, sums=sums)
    yield replace(base, input_scale=static)
    yield replace(base, sums=sums, input_scale=static, input_zero_point=zero)


_run = NativeOp(INT8_LINEAR, "qqqqqqqqqqqqq")


def _native(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, PanelInt8) or x.dtype not in DTYPES:
        return NotImplemented
    y = empty_product(x, weight.shape, bias)
    if y is None:
        return NotImplemented
    _run(
        x.data_ptr(), x.stride(0) * x.element_size(), weight.codes.data_ptr(),
        weight.scale.data_ptr(), address_of(weight.sums), address_of(weight.input_scale),
        address_of(weight.input_zero_point), address_of(bias), y.data_ptr(), *x.shape, y.shape[1],
        DTYPES[x.dtype],
    )  # fmt: skip
    return y


@kernel_for("product", "panel_int8")
@op(cases=_cases, native=_native, gpu="linear.int8_linear")
def int8_linear(x: Tensor, weight: Int8Weight | PanelInt8, bias: Tensor | None = None) -> Tensor:
    """Multiply every row of x by a weight in bytes.

    x: [T, I], rows may be strided. weight: [O, I]. bias: [O], x's dtype.
    Returns a new [T, O] in x.dtype.
    """
    if isinstance(weight, PanelInt8):
        weight = weight.int8_weight()
    q, scale, zero = quantize_int8(x, weight.symmetric, weight.input_scale, weight.input_zero_point)
    total = multiply_exactly(q, weight.data)
    if weight.sums is not None:
        total = total - zero[:, None] * weight.sums
    y = total.float() * scale[:, None] * weight.scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def multiply_exactly(q: Tensor, data: Tensor) -> Tensor:
    """q @ data.T of bytes [T, I] and [O, I]: int32 [T, O], on any device."""
    total = torch.zeros(q.shape[0], data.shape[0], dtype=torch.int32, device=q.device)
    for at in range(0, q.shape[1], EXACT_INPUTS):
        part = slice(at, at + EXACT_INPUTS)
        total += (q[:, part].float() @ data[:, part].float().t()).int()
    return total
