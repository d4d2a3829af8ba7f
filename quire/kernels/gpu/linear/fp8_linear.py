"""FP8 linear: the product of e4m3 rows and an e4m3 weight on the GPU.

The library's kernels where they support the shape (inputs and outputs in multiples of 16; for
blocks, scales in rows of 16 bytes), else the Triton product below, which supports any; few rows
have a file of their own. All add in the tensor cores and scale at the end; by blocks, each 128
inputs are scaled and added. For rows in float32, which are for checking only, sums are exact to
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8Weight
from quire.kernels.gpu.linear import fp8_small_m_gemm, quantize_fp8
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

MAX_SMALL_M = 64
"""Rows up to which reading the weights takes most of the time."""

MAX_SMALL_M_WIDE = 32
"""The same by blocks, for weights of many outputs: our scales cost more than the library's."""

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@kernel("T", "xs_step")
def _product(
    q_ptr,  # [T, I] e4m3
    xs_ptr,  # [T] or [GROUPS, T], xs_step apart
    w_ptr,  # [O, I] e4m3
    ws_ptr,  # [O] or [O // 128, GROUPS]
    bias_ptr,  # [O], read only if HAS_BIAS
    y_ptr,  # [T, O] out
    T,
    xs_step,
    I: tl.constexpr,
    O: tl.constexpr,
    GROUPS: tl.constexpr,  # ceil(I / 128)
    BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
):
    pid = tl.program_id(0)
    row_tiles = tl.cdiv(T, BT)
    t = (pid % row_tiles) * BT + tl.arange(0, BT)
    o = (pid // row_tiles) * BO + tl.arange(0, BO)
    t_live, o_live = t < T, o < O
    i = tl.arange(0, 128)
    q_at = q_ptr + t.to(tl.int64)[:, None] * I + i[None, :]  # T * I can pass 2**31
    w_at = w_ptr + o.to(tl.int64)[:, None] * I + i[None, :]
    acc = tl.zeros((BT, BO), tl.float32)
    for g in range(GROUPS):
        live = i[None, :] < I - g * 128
        q = tl.load(q_at + g * 128, mask=t_live[:, None] & live, other=0.0)
        w = tl.load(w_at + g * 128, mask=o_live[:, None] & live, other=0.0)
        if BY_BLOCK:
            xs = tl.load(xs_ptr + t + g * xs_step, mask=t_live, other=0.0)
            ws = tl.load(ws_ptr + (o // 128) * GROUPS + g, mask=o_live, other=0.0)
            acc += tl.dot(q, tl.trans(w)) * (xs[:, None] * ws[None, :])
        else:
            acc = tl.dot(q, tl.trans(w), acc)
    if not BY_BLOCK:
        xs = tl.load(xs_ptr + t, mask=t_live, other=0.0)
        ws = tl.load(ws_ptr + o, mask=o_live, other=0.0)
        acc *= xs[:, None] * ws[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o, mask=o_live, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=t_live[:, None] & o_live[None, :])


@kernel()
def _scale(
    sum_ptr,  # [T, O] float32
    xs_ptr,  # [T]
    ws_ptr,  # [O]
    bias_ptr,  # [O], read only if HAS_BIAS
    y_ptr,  # [T, O] out
    O: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # T * O can pass 2**31
    o = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = o < O
    ws = tl.load(ws_ptr + o, live, 0.0)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    y = tl.load(sum_ptr + t * O + o, live, 0.0) * (ws * tl.load(xs_ptr + t))
    if HAS_BIAS:
        y += tl.load(bias_ptr + o, live, 0.0).to(tl.float32)
    tl.store(y_ptr + t * O + o, y.to(y_ptr.dtype.element_ty), live)


def outputs(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    if x.dim() != 2 or x.dtype not in OUTPUT_DTYPES or x.stride(1) != 1:
        return NotImplemented
    if x.shape[1] > quantize_fp8.MAX_INPUTS:
        return NotImplemented
    rows, outputs = x.shape[0], weight.shape[0]
    most = quantize_fp8.padded_rows(rows) if weight.block_size else rows
    out = torch.empty(most, outputs, dtype=x.dtype, device=x.device)
    return out if most == rows else out[:rows]


def launch(out: Tensor, x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> None:
    rows = quantize_fp8.empty_quantized(x.shape[0], x.shape[1], weight.block_size, x.device)
    quantize_fp8.launch(rows, x, weight.block_size, weight.input_scale)
    scaled_mm(out, *rows, weight, bias)


def scaled_mm(
    out: Tensor, q: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None = None
) -> None:
    """Fill out [T, O] from rows already quantized."""
    rows = q.shape[0]
    if not rows:
        return
    takes = scaled_mm_supports(q, weight) and out.dtype != torch.float32
    if takes and weight.block_size and rows > _max_small_m_blockwise(weight):
        _blockwise_scaled_mm(out, q, scale, weight, bias)
    elif rows <= MAX_SMALL_M:
        fp8_small_m_gemm.small_m_product(out, q, scale, weight, bias)
    elif not takes:
        triton_scaled_mm(out, q, scale, weight, bias)
    elif _prefer_split_k(rows, weight):
        _mm_then_scale(out, q, scale, weight, bias)
    else:
        _torch_scaled_mm(out, q, scale[:, None], weight, weight.scale[None], bias)


def _max_small_m_blockwise(weight: Fp8Weight) -> int:
    """Rows up to which our product by blocks is the faster."""
    return MAX_SMALL_M if weight.shape[0] <= 4096 else MAX_SMALL_M_WIDE


def _prefer_split_k(rows: int, weight: Fp8Weight) -> bool:
    """Whether the library should split the sums, which it does only without scales."""
    outputs, inputs = weight.shape
    tiles = cdiv(rows, 128) * cdiv(outputs, 128)
    return tiles <= (96 if inputs >= 8192 else 64) and rows <= 384 and weight.unit_scale is not None


def scaled_mm_supports(q: Tensor, weight: Fp8Weight) -> bool:
    """Whether torch._scaled_mm has a kernel for these operands."""
    outputs, inputs = weight.shape
    if q.is_cpu or inputs % 16 or outputs % 16:
        return False
    return not weight.block_size or (inputs % 512 == 0 and outputs % 128 == 0)


def _blockwise_scaled_mm(
    out: Tensor, q: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None
) -> None:
    """With padding after the rows, if they need it: its results are not read."""
    (rows, inputs), outputs = q.shape, out.shape[1]
    most = quantize_fp8.padded_rows(rows)
    if most != rows:
        if (
            scale.stride(0) != most
            or out.untyped_storage().nbytes() < most * outputs * out.itemsize
        ):
            triton_scaled_mm(out, q, scale, weight, bias)  # rows without padding
            return
        q = q.as_strided((most, inputs), (inputs, 1))
        scale = scale.as_strided((scale.shape[0], most), (most, 1))
        out = out.as_strided((most, outputs), (outputs, 1))
    _torch_scaled_mm(out, q, scale.t(), weight, weight.scale.t(), bias)


def _torch_scaled_mm(
    out: Tensor, q: Tensor, qs: Tensor, weight: Fp8Weight, ws: Tensor, bias: Tensor | None
) -> None:
    torch._scaled_mm(
        q, weight.data.t(), scale_a=qs, scale_b=ws, bias=bias, out_dtype=out.dtype,
        use_fast_accum=not weight.block_size and bias is None, out=out,
    )  # fmt: skip


def _mm_then_scale(
    out: Tensor, q: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None
) -> None:
    """The library's plain sums in float32, scaled in a second pass."""
    assert weight.unit_scale is not None, "the weight was not prepared for a GPU"
    sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    torch._scaled_mm(
        q, weight.data.t(), scale_a=weight.unit_scale, scale_b=weight.unit_scale,
        out_dtype=torch.float32,
        use_fast_accum=True, out=sums,
    )  # fmt: skip
    rows, outputs = out.shape
    width = min(next_power_of_2(outputs), 2048)
    grid = (rows, cdiv(outputs, width), 1)
    tensors = (sums, scale, weight.scale, bias, out)
    _scale(grid, tensors, (), (outputs, bias is not None, width, PDL_ENABLED), 4, pdl=PDL_ENABLED)


class Fp8LinearTile(NamedTuple):
    """Split of a product: rows and outputs of a program, its warps and stages."""

    rows: int
    outputs: int
    warps: int
    stages: int


def fp8_linear_tile(rows: int, exact: bool) -> Fp8LinearTile:
    """Tiles as tall as the rows, up to the limit of the registers.

    exact: too low for Hopper's matrix instruction, which loses bits of its sums.
    """
    if exact:
        return Fp8LinearTile(32, 64, 4, 4)
    tall = min(max(next_power_of_2(rows), 16), 128)
    wide = 128 if tall >= 64 else 64
    return Fp8LinearTile(tall, wide, 8 if tall * wide >= 16384 else 4, 4)


def triton_scaled_mm(
    out: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    tile: Fp8LinearTile | None = None,
) -> None:
    """The same in Triton, for any shape."""
    rows, (outputs, inputs) = q.shape[0], weight.shape
    bt, bo, warps, stages = tile or fp8_linear_tile(rows, out.dtype == torch.float32)
    grid = (cdiv(rows, bt) * cdiv(outputs, bo), 1, 1)
    step = scale.stride(0) if weight.block_size else 0
    groups = cdiv(inputs, BLOCK_SIZE)
    consts = (inputs, outputs, groups, bool(weight.block_size), bias is not None, bt, bo)
    tensors = (q, scale, weight.data, weight.scale, bias, out)
    _product(grid, tensors, (rows, step), consts, warps, stages)
