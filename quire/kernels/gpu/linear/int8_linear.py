"""INT8 linear: the product of rows in bytes and a weight in bytes on the GPU (W8A8).

Sums are of integers, and exact: neither the tile nor the number of rows changes a bit. A few rows
are the right operand, so that the matrix instruction's tall side has outputs; the weight is read
once. See quire.kernels.int8_linear.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.linear import int8_gemm_hopper, quantize_int8
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)

_MANY_OUTPUTS = 16384

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@kernel("T")
def _int8_product(
    q_ptr,  # [T, I] int8
    xs_ptr,  # [T]
    zero_ptr,  # [T] int32, if ASYMMETRIC
    w_ptr,  # [O, I] int8
    ws_ptr,  # [O]
    sums_ptr,  # [O] int32, if ASYMMETRIC
    bias_ptr,  # [O], read only if HAS_BIAS
    y_ptr,  # [T, O] out
    T,
    I: tl.constexpr,
    O: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    ROWS_RIGHT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    row_tiles = tl.cdiv(T, BT)
    t = (pid % row_tiles) * BT + tl.arange(0, BT)
    first = (pid // row_tiles) * BO
    o = first + tl.arange(0, BO)
    t_live, o_live = t < T, o < O
    i = tl.arange(0, BK)
    ws = tl.load(ws_ptr + o, mask=o_live, other=0.0)
    if PDL:
        if AHEAD and (BO * I) % 16 == 0 and first + BO <= O:
            prefetch_l2(w_ptr + first.to(tl.int64) * I, BO * I)
        launch_dependents()
        wait_for_previous_kernel()
    q_at = q_ptr + t.to(tl.int64)[:, None] * I + i[None, :]  # T * I can pass 2**31
    w_at = w_ptr + o.to(tl.int64)[:, None] * I + i[None, :]
    if ROWS_RIGHT:
        acc = tl.zeros((BO, BT), tl.int32)
    else:
        acc = tl.zeros((BT, BO), tl.int32)
    for low in tl.range(0, I, BK, num_stages=STAGES):
        live = i[None, :] < I - low
        q = tl.load(q_at + low, mask=t_live[:, None] & live, other=0)
        w = tl.load(w_at + low, mask=o_live[:, None] & live, other=0)
        if ROWS_RIGHT:
            acc = tl.dot(w, tl.trans(q), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(q, tl.trans(w), acc, out_dtype=tl.int32)
    if ROWS_RIGHT:
        acc = tl.trans(acc)
    if ASYMMETRIC:
        zero = tl.load(zero_ptr + t, mask=t_live, other=0)
        acc -= zero[:, None] * tl.load(sums_ptr + o, mask=o_live, other=0)[None, :]
    y = acc.to(tl.float32) * tl.load(xs_ptr + t, mask=t_live, other=0.0)[:, None] * ws[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + o, mask=o_live, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=t_live[:, None] & o_live[None, :])


class Int8LinearTile(NamedTuple):
    """Split of a product: rows, outputs and inputs at once of a program, its warps and stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    prefetch: bool = False  # whether its band is prefetched to L2 before the rows are ready

    @property
    def rows_right(self) -> bool:
        return self.rows < 64


def int8_linear_tile(rows: int, outputs: int) -> Int8LinearTile:
    """Narrow bands of the weight for a few rows, so that all memory is busy; else tall tiles.

    As measured on an H200 with the products of llama-8b.
    """
    if rows <= 32:
        return Int8LinearTile(max(next_power_of_2(rows), 16), 64, 256, 4, 5)
    if rows <= 64 and outputs < _MANY_OUTPUTS:
        return Int8LinearTile(64, 32, 256, 4, 4)
    if rows <= 128:
        return Int8LinearTile(64, 64, 256, 4, 3)
    if cdiv(rows, 128) * cdiv(outputs, 128) < 64:
        return Int8LinearTile(64, 64, 128, 4, 4)
    return Int8LinearTile(128, 128, 128, 8, 4)


def _fills_large_tiles(rows: int, outputs: int) -> bool:
    """Whether tiles of 128 rows, which Hopper multiplies best, keep enough of it busy."""
    return rows > 128 or (rows > 64 and outputs >= _MANY_OUTPUTS)


def outputs(x: Tensor, weight: object, bias: Tensor | None = None) -> Tensor:
    """A new [T, O]. NotImplemented for rows and weights that the kernels do not read."""
    if not isinstance(weight, Int8Weight):
        return NotImplemented
    if x.dim() != 2 or x.dtype not in OUTPUT_DTYPES or x.stride(1) != 1:
        return NotImplemented
    if x.shape[1] > quantize_int8.MAX_INPUTS or not weight.data.is_contiguous():
        return NotImplemented
    return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)


def launch(out: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> None:
    """Quantize the rows of x and multiply them."""
    if not x.shape[0]:
        return
    how = (weight.symmetric, weight.input_scale, weight.input_zero_point)
    rows = quantize_int8.outputs(x, *how)
    quantize_int8.launch(rows, x, *how)
    multiply(out, *rows, weight, bias)


def multiply(
    out: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    weight: Int8Weight,
    bias: Tensor | None = None,
    tile: Int8LinearTile | None = None,
) -> None:
    """Fill out [T, O] from rows already quantized. zero: read if the weight has sums.

    tile: in place of the one of these sizes.
    """
    rows, (count, inputs) = q.shape[0], weight.shape
    large = tile is None and _fills_large_tiles(rows, count)
    if large and int8_gemm_hopper.supports(q, weight, out):
        int8_gemm_hopper.launch(out, q, scale, zero, weight, bias)
        return
    tile = tile or int8_linear_tile(rows, count)
    _int8_product(
        (cdiv(rows, tile.rows) * cdiv(count, tile.outputs), 1, 1),
        (q, scale, zero, weight.data, weight.scale, weight.sums, bias, out),
        (rows,),
        (
            inputs, count, not weight.symmetric, bias is not None, tile.rows, tile.outputs,
            tile.inputs, tile.rows_right, tile.stages, tile.prefetch, PDL_ENABLED,
        ),
        warps=tile.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
