"""INT8 quantization of rows: a program reads a row once, finds its scale and writes bytes.

The divisions are exact, and no product is fused with the sum after it: results equal the CPU's
bits. See quire.kernels.quantize_int8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.int8_weight import MIN_RANGE
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

MAX_INPUTS = 32768
"""Inputs of the widest row that a program holds."""

_MIN_RANGE = tl.constexpr(MIN_RANGE)
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is an integer


@triton.jit
def symmetric_codes(x, largest):
    """(codes as float32, scale) of numbers, given the bits of the largest magnitude among them.

    A row with a number that is not finite has the scale NaN, and its NaNs the code 0.
    """
    scale = tl.div_rn(tl.maximum(largest.to(tl.float32, bitcast=True), _MIN_RANGE), 127.0)
    scale = tl.where(largest < 0x7F800000, scale, float("nan"))
    y = x * tl.div_rn(1.0, scale)
    codes = tl.minimum(tl.maximum(y, -128.0), 127.0) + _ROUNDS - _ROUNDS
    return tl.where(y == y, codes, 0.0), scale


@triton.jit
def magnitude_bits(x):
    """The bits of the magnitudes of float32 numbers: integers of the same order."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_row(x, e, live, q_ptr, s_ptr, t):
    """Quantize one row x [BLOCK], float32, zero where not live. q_ptr: of the row."""
    codes, scale = symmetric_codes(x, tl.max(magnitude_bits(x), 0))
    tl.store(q_ptr + e, codes.to(tl.int8), mask=live)
    tl.store(s_ptr + t, scale)


@kernel()
def _rows(
    x_ptr,  # [T, I], rows X_ROW apart
    static_ptr,  # [1], if STATIC
    static_zero_ptr,  # [1] int32, if STATIC and not SYMMETRIC
    q_ptr,  # [T, I] out
    s_ptr,  # [T] out
    z_ptr,  # [T] int32 out
    I: tl.constexpr,
    X_ROW: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    STATIC: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= I
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    t = tl.program_id(0).to(tl.int64)  # T * I can pass 2**31
    e = tl.arange(0, WIDTH)
    live = e < I
    x = tl.load(x_ptr + t * X_ROW + e, mask=live, other=0.0).to(tl.float32)
    zero = (t * 0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
        inverse = tl.div_rn(1.0, scale)
        if not SYMMETRIC:
            zero = tl.load(static_zero_ptr).to(tl.float32)
    else:
        bits = tl.max(magnitude_bits(x), 0)
        finite = bits < 0x7F800000
        if SYMMETRIC:
            largest = tl.maximum(bits.to(tl.float32, bitcast=True), _MIN_RANGE)
            scale = tl.div_rn(largest, 127.0)
        else:
            low = tl.minimum(tl.min(x, 0), 0.0)
            span = tl.maximum(tl.maximum(tl.max(x, 0), 0.0) - low, _MIN_RANGE)
            scale = tl.div_rn(span, 255.0)
        scale = tl.where(finite, scale, float("nan"))
        inverse = tl.div_rn(1.0, scale)
        if not SYMMETRIC:
            steps = tl.minimum(low * inverse, 0.0)  # no higher: between a product and a sum
            zero = tl.where(finite, (-128.0 - steps) + _ROUNDS - _ROUNDS, 0.0)
    y = tl.minimum(tl.maximum(x * inverse, -512.0), 512.0)
    y = y + _ROUNDS - _ROUNDS + zero
    y = tl.where(x * inverse == x * inverse, tl.minimum(tl.maximum(y, -128.0), 127.0), 0.0)
    tl.store(q_ptr + t * I + e, y.to(tl.int8), mask=live)
    tl.store(s_ptr + t, scale)
    tl.store(z_ptr + t, zero.to(tl.int32))


def outputs(
    x: Tensor,
    symmetric: bool = True,
    static: Tensor | None = None,
    static_zero: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [T, I], scale [T], zero [T]). NotImplemented for rows the kernel does not hold."""
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] > MAX_INPUTS:
        return NotImplemented
    rows, device = x.shape[0], x.device
    return (
        torch.empty(x.shape, dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


def launch(
    outs: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    symmetric: bool = True,
    static: Tensor | None = None,
    static_zero: Tensor | None = None,
) -> None:
    """Fill (q, scale, zero)."""
    rows, inputs = x.shape
    if not rows:
        return
    width = next_power_of_2(inputs)
    _rows(
        (rows, 1, 1),
        (x, static, static_zero, *outs),
        (),
        (inputs, x.stride(0), symmetric, static is not None, width, PDL_ENABLED),
        warps=min(max(width // 1024, 1), 16),
        pdl=PDL_ENABLED,
    )
