"""One row times a weight matrix in e4m3: as gpu/gemv.py, the row quantized on the way in.

    q, xs = quantize(norm(x + residual))         each program does the whole row
    z     = xs * ws[o] * sum_i q[i] * w[o, i]    channels
    z     = sum_i (q[i] * xs[b] * ws[o / 128, b]) * w[o, i]    blocks, b = i / 128

The bytes are half of bf16's, so what is not bytes weighs double. Same rounding as fp8_linear.
Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import BLOCK, Fp8Weight
from quire.kernels.gpu.element import activate
from quire.kernels.gpu.gemv import (
    MAX_INPUTS,
    Act,
    Cut,
    Norm,
    normed,
    product,
    rows_of,
    tuned,
    vector,
)
from quire.kernels.gpu.quantize_fp8 import scale_of
from quire.kernels.gpu.start import kernel
from quire.kernels.gpu.wait import PDL, let_go, prefetch, wait_for_forerunner

_V = tl.constexpr(16)  # e4m3 numbers in one load of a thread


@triton.jit
def _quantized(xs, BK: tl.constexpr, C: tl.constexpr):
    """The row as e4m3 numbers, held in bf16, and its scale."""
    most = tl.zeros([BK], tl.float32)
    for c in tl.static_range(C):
        most = tl.maximum(most, tl.abs(xs[c].to(tl.float32)))
    scale, inverse = scale_of(tl.max(most, 0))
    qs = ()
    for c in tl.static_range(C):
        q = (xs[c].to(tl.float32) * inverse).to(tl.float8e4nv, fp_downcast_rounding="rtne")
        qs = qs + (q.to(tl.bfloat16),)  # type: ignore[assignment]
    return qs, scale


@triton.jit
def _quantized_blocks(xs, BK: tl.constexpr, C: tl.constexpr):
    """The row as e4m3 numbers times their scale, one scale per 128."""
    qs = ()
    for c in tl.static_range(C):
        x = tl.reshape(xs[c].to(tl.float32), (BK // 128, 128))
        scale, inverse = scale_of(tl.max(tl.abs(x), 1))
        q = (x * inverse[:, None]).to(tl.float8e4nv, fp_downcast_rounding="rtne")
        qs = qs + (tl.reshape(q.to(tl.float32) * scale[:, None], (BK,)),)  # type: ignore[assignment]
    return qs


@triton.jit
def _scaled(qs, ws_ptr, row, k, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """qs times the scales of the weight blocks that row `row` is in."""
    GROUPS: tl.constexpr = (I + 127) // 128
    scaled = ()
    for c in tl.static_range(C):
        g = (c * BK + k) // 128
        ws = tl.load(ws_ptr + (row // 128) * GROUPS + g, g < GROUPS, 0.0)
        scaled = scaled + (qs[c] * ws,)  # type: ignore[assignment]
    return scaled


@triton.jit
def _finish(sums, n, live, xs_scale, ws_ptr, bias_ptr, BLOCKS: tl.constexpr, BIAS: tl.constexpr):
    """Scale and shift the outputs of rows n of W."""
    if not BLOCKS:
        sums = sums * xs_scale * tl.load(ws_ptr + n, live, 0.0)
    if BIAS:
        sums += tl.load(bias_ptr + n, live, 0.0).to(tl.float32)
    return sums


@triton.jit
def _band(w_ptr, n, k, O: tl.constexpr, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
          PAIR: tl.constexpr):  # fmt: skip
    """Rows n of W, and of its other half if there are two: tiles of both, one after the other."""
    tiles = rows_of(w_ptr, n, k, O, I, BK, C)
    if PAIR:
        tiles = tiles + rows_of(w_ptr + O * I, n, k, O, I, BK, C)
    return tiles


@triton.jit
def _emit(tiles, qs, us, n, scale, ws_ptr, bias_ptr, z_ptr, a_ptr, O: tl.constexpr,
          BIAS: tl.constexpr, BLOCKS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Multiply a band and store what comes of it."""
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = product(tiles, qs, BN, BK, C, _V)
    z = _finish(z, n, n < O, scale, ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
    tl.store(z_ptr + n, z, n < O)
    if ACT is not None:
        u = product(tiles[C:], us, BN, BK, C, _V)
        u = _finish(u, O + n, n < O, scale, ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
        tl.store(z_ptr + O + n, u, n < O)
        a = activate(z.to(tl.float32), ACT) * u.to(tl.float32)
        tl.store(a_ptr + n, a.to(dtype), n < O)


@kernel("eps", "offset")
def _gemv_fp8(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I] e4m3, or [2 * O, I] if ACT
    ws_ptr,  # [O] fp32, or [O / 128, I / 128] if BLOCKS
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
    PAIR: tl.constexpr = ACT is not None
    LOADED: tl.constexpr = BN if TIMES > 1 else 0
    SIZE: tl.constexpr = (BN * TIMES - LOADED) * I
    k = tl.arange(0, BK)
    n = first + tl.arange(0, BN)
    tiles = _band(w_ptr, n, k, O, I, BK, C, PAIR)
    if NORM:
        norm = vector(norm_ptr, k, I, BK, C)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN * TIMES <= O:
            start = (first + LOADED).to(tl.int64) * I
            prefetch(w_ptr + start, SIZE)
            if PAIR:
                prefetch(w_ptr + O * I + start, SIZE)
        let_go()
        wait_for_forerunner()
    if NORM:
        xs = normed(x_ptr, res_ptr, norm, y_ptr, r_ptr, k, eps, offset, I, BK, C, ADD)
    else:
        xs = vector(x_ptr, k, I, BK, C)
    if BLOCKS:  # a program's rows lie in one block: BN * TIMES divides 128
        qs = _quantized_blocks(xs, BK, C)
        us = _scaled(qs, ws_ptr, O + first, k, I, BK, C) if PAIR else qs
        qs = _scaled(qs, ws_ptr, first, k, I, BK, C)
        scale = 1.0
    else:
        qs, scale = _quantized(xs, BK, C)
        us = qs
    for _ in range(TIMES - 1):
        ahead = _band(w_ptr, n + BN, k, O, I, BK, C, PAIR)  # in flight while these are summed
        _emit(tiles, qs, us, n, scale, ws_ptr, bias_ptr, z_ptr, a_ptr,
              O, BIAS, BLOCKS, ACT, BN, BK, C)  # fmt: skip
        tiles = ahead
        n += BN
    _emit(tiles, qs, us, n, scale, ws_ptr, bias_ptr, z_ptr, a_ptr,
          O, BIAS, BLOCKS, ACT, BN, BK, C)  # fmt: skip


def takes(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether one row of x can go this way: half precision, packed, no scale fixed beforehand."""
    if not isinstance(weight, Fp8Weight) or weight.static is not None or x.shape[0] != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1:
        return False
    outputs, inputs = weight.shape
    if inputs > MAX_INPUTS or inputs % 16 or (weight.block and outputs % (2 * BLOCK)):
        return False
    return bias is None or bias.is_contiguous()


def cut_of(outputs: int, inputs: int, pair: bool) -> Cut:
    """As gemv.cut_of, with two loads of 16 numbers a row; powers of two, so that the rows of a
    program lie in one block of weights.
    """
    found = tuned("e4m3", outputs, inputs, pair)
    if found is not None:
        return found
    columns = min(triton.next_power_of_2(inputs), 4096)
    warps = 8 if inputs > 8192 else max(1, columns // 1024)
    numbers = triton.cdiv(inputs, columns) * columns * (2 if pair else 1) // (32 * warps)
    rows = 8
    while rows > 1 and (rows * numbers > 128 or outputs < 384 * rows):
        rows //= 2
    times = 4
    while times > 1 and outputs < 512 * rows * times:
        times //= 2
    return Cut(rows, columns, times, warps, inputs <= 1024)


def launch(
    z: Tensor,
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    act: Act | None = None,
    quiet: bool = False,
    cut: Cut | None = None,
) -> None:
    """z [1, O] = weight @ x; with a norm, x is what the norm makes. Fills norm's and act's too.

    quiet: the kernel before leaves memory idle (attention does), so weights may come early.
    """
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    rows, columns, times, warps, ahead = cut or cut_of(outputs, inputs, act is not None)
    add = norm is not None and norm.residual is not None
    data, scale = weight.data, weight.scale
    out = None if act is None else act.out
    tensors: tuple[Tensor | None, ...] = (x, None, None, data, scale, bias, z, None, None, out)
    numbers = (0.0, 0.0)
    if norm is not None:
        r = norm.r if add else None
        tensors = (norm.x, norm.residual, norm.weight, data, scale, bias, z, norm.y, r, out)
        numbers = (norm.eps, norm.offset)
    _gemv_fp8(
        (triton.cdiv(outputs, rows * times), 1, 1),
        tensors,
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None, bool(weight.block),
            None if act is None else act.kind, rows, columns, times, ahead or (quiet and times > 1), PDL,
        ),
        warps=warps,
        pdl=PDL,
    )  # fmt: skip
