"""W8A8 GEMV kernel: one row times a weight in bytes, as gemv.py, with the row quantized before.

    q, s = quantize(norm(x + residual))         each program does the whole row
    z    = s * ws[o] * sum_i q[i] * w[o, i]     sums of integers, four products an instruction

Rounds as int8_linear. Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    MAX_INPUTS,
    FusedActivation,
    FusedNorm,
    GemvPlan,
    load_normed_vector,
    load_vector,
)
from quire.kernels.gpu.linear.gemv_fp8 import load_tiles, plan_gemv_bytes
from quire.kernels.gpu.linear.quantize_int8 import magnitude_bits, symmetric_codes
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)


@triton.jit
def _pack_words(codes, BW: tl.constexpr):
    """[4 * BW] codes as words of four bytes."""
    even, odd = tl.split(tl.reshape(codes.to(tl.int32) & 0xFF, (BW, 2, 2)))
    low, high = tl.split(even | (odd << 8))
    return low | (high << 16)


@triton.jit
def _quantize_vector(xs, BK: tl.constexpr, C: tl.constexpr):
    """The row as C times [BK / 4] words, and its scale."""
    largest = tl.zeros([BK], tl.int32)
    for c in tl.static_range(C):
        largest = tl.maximum(largest, magnitude_bits(xs[c].to(tl.float32)))
    most = tl.max(largest, 0)
    words = ()
    for c in tl.static_range(C):
        codes, scale = symmetric_codes(xs[c].to(tl.float32), most)
        words = words + (_pack_words(codes, BK // 4),)  # type: ignore[assignment]
    return words, scale


@triton.jit
def _byte(word, J: tl.constexpr):
    return (word << (24 - 8 * J)) >> 24


@triton.jit
def _dot(tiles, words, BN: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):
    """C tiles of words times the row: int32 [BN]."""
    acc = tl.zeros([BN, BW], tl.int32)
    for c in tl.static_range(C):
        row = tl.broadcast_to(words[c][None, :], (BN, BW))
        if ASM:
            acc = tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [tiles[c], row, acc],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            for j in tl.static_range(4):
                acc += _byte(tiles[c], j) * _byte(row, j)
    return tl.sum(acc, 1)


@triton.jit
def _multiply_and_store(tiles, words, scale, n, ws_ptr, bias_ptr, z_ptr, a_ptr, O: tl.constexpr,
          BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
          C: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Multiply a band and store its results."""
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    live = n < O
    z = _dot(tiles, words, BN, BW, C, ASM).to(tl.float32) * scale * tl.load(ws_ptr + n, live, 0.0)
    if BIAS:
        z += tl.load(bias_ptr + n, live, 0.0).to(tl.float32)
    z = z.to(dtype)
    tl.store(z_ptr + n, z, live)
    if ACT is not None:
        u = _dot(tiles[C:], words, BN, BW, C, ASM).to(tl.float32) * scale
        u *= tl.load(ws_ptr + O + n, live, 0.0)
        if BIAS:
            u += tl.load(bias_ptr + O + n, live, 0.0).to(tl.float32)
        u = u.to(dtype)
        tl.store(z_ptr + O + n, u, live)
        a = activate(z.to(tl.float32), ACT) * u.to(tl.float32)
        tl.store(a_ptr + n, a.to(dtype), live)


@kernel("eps", "offset")
def _gemv_int8(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I / 4] words of bytes, or [2 * O, I / 4] if ACT
    ws_ptr,  # [O] fp32, or [2 * O]
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
    tiles = load_tiles(w_ptr, n, word, O, W, BW, C, PAIR)
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
    words, scale = _quantize_vector(xs, BK, C)
    for _ in range(TIMES - 1):
        ahead = load_tiles(w_ptr, n + BN, word, O, W, BW, C, PAIR)  # in flight meanwhile
        _multiply_and_store(tiles, words, scale, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
              O, BIAS, ACT, BN, BW, C, PDL)  # fmt: skip
        tiles = ahead
        n += BN
    _multiply_and_store(tiles, words, scale, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
          O, BIAS, ACT, BN, BW, C, PDL)  # fmt: skip


def supports(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, a scale of its own."""
    if not quantizes(weight) or x.shape[0] != 1 or x.stride(1) != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] % 16:
        return False
    return x.shape[1] <= MAX_INPUTS and (bias is None or bias.is_contiguous())


def quantizes(weight: Int8Weight) -> bool:
    """Whether rows for this weight have scales of their own and no zero point."""
    return weight.symmetric and weight.input_scale is None and weight.data.is_contiguous()


def launch(
    z: Tensor,
    x: Tensor,
    weight: Int8Weight,
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
    rows, columns, times, warps, ahead = cut or plan_gemv_bytes(
        "int8", outputs, inputs, act is not None
    )
    add = norm is not None and norm.residual is not None
    data, scale = weight.data.view(torch.int32), weight.scale
    out = None if act is None else act.out
    tensors: tuple[Tensor | None, ...] = (x, None, None, data, scale, bias, z, None, None, out)
    numbers = (0.0, 0.0)
    if norm is not None:
        r = norm.r if add else None
        tensors = (norm.x, norm.residual, norm.weight, data, scale, bias, z, norm.y, r, out)
        numbers = (norm.eps, norm.offset)
    _gemv_int8(
        (cdiv(outputs, rows * times), 1, 1),
        tensors,
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None,
            None if act is None else act.kind, rows, columns, times,
            ahead or (memory_idle and times > 1), PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
