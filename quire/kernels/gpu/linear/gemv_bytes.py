"""GEMV kernel of weights of a byte: one row times them, as gemv.py, with the row quantized before.

    q, xs = quantize(norm(x + residual))         each program does the whole row
    z     = xs * ws[o] * sum_i q[i] * w[o, i]    e4m3 by channels, int8
    z     = sum_i (q[i] * xs[b] * ws[o / 128, b]) * w[o, i]    e4m3 by blocks, b = i / 128

The bytes are half of bf16's, so all other costs weigh double. Rounds as fp8_linear and int8_linear.
Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8Weight
from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    MAX_INPUTS,
    FusedActivation,
    FusedNorm,
    GemvPlan,
    load_normed_vector,
    load_vector,
    load_weight_rows,
    tuned_plan,
)
from quire.kernels.gpu.linear.quantized_row import (
    apply_block_scales,
    multiply_words,
    quantize_row,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)


@triton.jit
def _load_tiles(w_ptr, n, k, O: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
                C: tl.constexpr, PAIR: tl.constexpr):  # fmt: skip
    """Rows n of W, and of its other half if there are two: C tiles [BN, BW] of words of each."""
    tiles = load_weight_rows(w_ptr, n, k, O, W, BW, C)
    if PAIR:
        tiles = tiles + load_weight_rows(w_ptr + O * W, n, k, O, W, BW, C)
    return tiles


@triton.jit
def _scale_and_bias(
    sums, n, live, scale, ws_ptr, bias_ptr, BLOCKS: tl.constexpr, BIAS: tl.constexpr
):
    """Scale and shift the outputs of rows n of W."""
    if not BLOCKS:
        sums = sums * scale * tl.load(ws_ptr + n, live, 0.0)
    if BIAS:
        sums += tl.load(bias_ptr + n, live, 0.0).to(tl.float32)
    return sums


@triton.jit
def _multiply_and_store(tiles, row, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
                        O: tl.constexpr, BIAS: tl.constexpr, INT8: tl.constexpr,
                        BLOCKS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
                        BW: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Multiply a band and store its results."""
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = multiply_words(tiles, row, scales, BN, BW, C, INT8, BLOCKS, ASM)
    z = _scale_and_bias(z, n, n < O, scales[0], ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
    tl.store(z_ptr + n, z, n < O)
    if ACT is not None:
        u = multiply_words(tiles[C:], row, up_scales, BN, BW, C, INT8, BLOCKS, ASM)
        u = _scale_and_bias(u, O + n, n < O, scales[0], ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
        tl.store(z_ptr + O + n, u, n < O)
        a = activate(z.to(tl.float32), ACT) * u.to(tl.float32)
        tl.store(a_ptr + n, a.to(dtype), n < O)


@kernel("eps", "offset")
def _gemv_bytes(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I / 4] words, or [2 * O, I / 4] if ACT
    ws_ptr,  # [O] or [2 * O] fp32, or [O / 128, I / 128] if BLOCKS
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    z_ptr,  # [O] or [2 * O] out
    y_ptr,  # [I] out if NORM
    r_ptr,  # [I] out if ADD
    a_ptr,  # [O] out if ACT
    eps,
    offset,
    O: tl.constexpr,
    I: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    INT8: tl.constexpr,  # else e4m3
    BLOCKS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    BN: tl.constexpr,
    BK: tl.constexpr,
    TIMES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * (BN * TIMES)
    C: tl.constexpr = (I + BK - 1) // BK
    W: tl.constexpr = I // 4
    BW: tl.constexpr = BK // 4
    PAIR: tl.constexpr = ACT is not None
    LOADED: tl.constexpr = BN if TIMES > 1 else 0
    SIZE: tl.constexpr = (BN * TIMES - LOADED) * I
    k = tl.arange(0, BK)
    word = tl.arange(0, BW)
    n = first + tl.arange(0, BN)
    tiles = _load_tiles(w_ptr, n, word, O, W, BW, C, PAIR)
    if NORM:
        norm = load_vector(norm_ptr, k, I, BK, C)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN * TIMES <= O:
            start = (first + LOADED).to(tl.int64) * W
            prefetch_l2(w_ptr + start, SIZE)
            if PAIR:
                prefetch_l2(w_ptr + O * W + start, SIZE)
        launch_dependents()
        wait_for_previous_kernel()
    if NORM:
        xs = load_normed_vector(x_ptr, res_ptr, norm, y_ptr, r_ptr, k, eps, offset, I, BK, C, ADD)
    else:
        xs = load_vector(x_ptr, k, I, BK, C)
    row, own = quantize_row(xs, BK, C, INT8, BLOCKS)
    scales, up_scales = own, own
    if BLOCKS:  # a program's rows are in one block: BN * TIMES divides 128
        scales = apply_block_scales(own, ws_ptr, first, I, BK, C)
        if PAIR:
            up_scales = apply_block_scales(own, ws_ptr, O + first, I, BK, C)
    for _ in range(TIMES - 1):
        ahead = _load_tiles(w_ptr, n + BN, word, O, W, BW, C, PAIR)  # in flight meanwhile
        _multiply_and_store(tiles, row, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
                            O, BIAS, INT8, BLOCKS, ACT, BN, BW, C, PDL)  # fmt: skip
        tiles = ahead
        n += BN
    _multiply_and_store(tiles, row, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
                        O, BIAS, INT8, BLOCKS, ACT, BN, BW, C, PDL)  # fmt: skip


def supports(x: Tensor, weight: Fp8Weight | Int8Weight, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, with scales of its own."""
    outputs, inputs = weight.shape
    if x.shape[0] != 1 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if inputs > MAX_INPUTS or inputs % 16 or not quantizes(weight):
        return False
    whole = (
        isinstance(weight, Int8Weight) or not weight.block_size or not outputs % (2 * BLOCK_SIZE)
    )
    return whole and (bias is None or bias.is_contiguous())


def quantizes(weight: Fp8Weight | Int8Weight) -> bool:
    """Whether rows for this weight have scales of their own and no zero point."""
    if isinstance(weight, Fp8Weight):
        return weight.input_scale is None
    return weight.symmetric and weight.input_scale is None and weight.data.is_contiguous()


def plan_gemv_bytes(kind: str, outputs: int, inputs: int, pair: bool) -> GemvPlan:
    """As plan_gemv, with two loads of 16 numbers a row; powers of two, so that the rows of a
    program are in one block of weights. kind: "e4m3" or "int8".
    """
    found = tuned_plan(kind, outputs, inputs, pair)
    if found is not None:
        return found
    columns = min(next_power_of_2(inputs), 4096)
    warps = 8 if inputs > 8192 else max(1, columns // 1024)
    numbers = cdiv(inputs, columns) * columns * (2 if pair else 1) // (32 * warps)
    rows = 8
    while rows > 1 and (rows * numbers > 128 or outputs < 384 * rows):
        rows //= 2
    times = 4
    while times > 1 and outputs < 512 * rows * times:
        times //= 2
    rows = max(rows, 512 * warps // columns)
    return GemvPlan(rows, columns, times, warps, inputs <= 1024)


def launch(
    z: Tensor,
    x: Tensor,
    weight: Fp8Weight | Int8Weight,
    bias: Tensor | None = None,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    memory_idle: bool = False,
    cut: GemvPlan | None = None,
) -> None:
    """z [1, O] = weight @ x; with a norm, x is the norm's input. Fills norm's and act's results.

    memory_idle: the previous kernel leaves memory idle (as attention), so weights may load early.
    """
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    int8 = isinstance(weight, Int8Weight)
    kind = "int8" if int8 else "e4m3"
    plan = cut or plan_gemv_bytes(kind, outputs, inputs, act is not None)
    rows, columns, times, warps, ahead = plan
    assert int8 or rows * columns >= 512 * warps, "four words of a thread must be in one row"
    blocks = isinstance(weight, Fp8Weight) and weight.block_size > 0
    add = norm is not None and norm.residual is not None
    data, scale = weight.data.view(torch.int32), weight.scale
    out = None if act is None else act.out
    tensors: tuple[Tensor | None, ...] = (x, None, None, data, scale, bias, z, None, None, out)
    numbers = (0.0, 0.0)
    if norm is not None:
        r = norm.r if add else None
        tensors = (norm.x, norm.residual, norm.weight, data, scale, bias, z, norm.y, r, out)
        numbers = (norm.eps, norm.offset)
    _gemv_bytes(
        (cdiv(outputs, rows * times), 1, 1),
        tensors,
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None, int8, blocks,
            None if act is None else act.kind, rows, columns, times,
            ahead or (memory_idle and times > 1), PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
