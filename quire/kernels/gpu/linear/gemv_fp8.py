"""FP8 GEMV kernel: one row times a weight in e4m3, as gemv.py, with the row quantized before.

    q, xs = quantize(norm(x + residual))         each program does the whole row
    z     = xs * ws[o] * sum_i q[i] * w[o, i]    channels
    z     = sum_i (q[i] * xs[b] * ws[o / 128, b]) * w[o, i]    blocks, b = i / 128

The bytes are half of bf16's, so all other costs weigh double. Rounds as fp8_linear.
Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8Weight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    MAX_INPUTS,
    FusedActivation,
    FusedNorm,
    GemvPlan,
    load_normed_vector,
    load_vector,
    tuned_plan,
)
from quire.kernels.gpu.linear.quantize_fp8 import scale_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)

_SMALL = tl.constexpr(2.0**-8)
"""Factor of the row, so that sums of sixteen products fit the range of float16."""

_FP8_DOT_ASM = tl.constexpr("""{
.reg .b16 l, h; .reg .b32 a, b, t; .reg .f32 x, y;
mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
mul.rn.f16x2 t, a, $8; fma.rn.f16x2 t, b, $12, t;
mov.b32 {l, h}, $5; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
fma.rn.f16x2 t, a, $9, t; fma.rn.f16x2 t, b, $13, t;
mov.b32 {l, h}, $6; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
fma.rn.f16x2 t, a, $10, t; fma.rn.f16x2 t, b, $14, t;
mov.b32 {l, h}, $7; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
fma.rn.f16x2 t, a, $11, t; fma.rn.f16x2 t, b, $15, t;
mov.b32 {l, h}, t; cvt.f32.f16 x, l; cvt.f32.f16 y, h; add.f32 $0, x, y;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")
"""Sixteen products of one thread: in pairs, added in float16, then one number in float32.

Unpacked to float32 first, e4m3 weights would cost 2.6 instructions each and keep memory waiting;
in this way they cost 1.4. The tensor cores add with about as many bits. The other three outputs
are zeros, because an element-wise function has as many results as arguments.
"""

_ASM_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 12))


@triton.jit
def _load_weight_words(
    ws_ptr, n, k, O: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr
):
    """Whole rows of W, four numbers a word, as C tiles [BN, BW]. Past the end, the last row."""
    tiles = ()
    base = ws_ptr + tl.minimum(n, O - 1).to(tl.int64)[:, None] * W + k[None, :]
    for c in tl.static_range(C):
        if (c + 1) * BW <= W:
            tile = tl.load(base + c * BW, eviction_policy="evict_first")
        else:
            tile = tl.load(base + c * BW, (c * BW + k < W)[None, :], 0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _pairs(q, BW: tl.constexpr):
    """[4 * BW] numbers as the first and the second pair of float16 of each word."""
    even, odd = tl.split(tl.reshape((q * _SMALL).to(tl.float16), (BW, 2, 2)))
    even = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    both = even | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.split(both)


@triton.jit
def _quantize_vector(xs, BK: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr):
    """The row as e4m3 numbers, in pairs, and its scales: one, or one for each 128.

    Returns C times (first pairs, second pairs), flat, and scales: C times [BK // 16], or one.
    """
    qs, scales = (), ()
    if BLOCKS:
        for c in tl.static_range(C):
            x = tl.reshape(xs[c].to(tl.float32), (BK // 128, 128))
            scale, inverse = scale_of(tl.max(tl.abs(x), 1))
            q = tl.reshape(
                (x * inverse[:, None]).to(tl.float8e4nv, fp_downcast_rounding="rtne"), (BK,)
            )
            qs = qs + _pairs(q.to(tl.float32), BK // 4)
            spread = tl.broadcast_to(scale[:, None], (BK // 128, 8))
            scales = scales + (tl.reshape(spread, (BK // 16,)) / _SMALL,)  # type: ignore[assignment]
    else:
        most = tl.zeros([BK], tl.float32)
        for c in tl.static_range(C):
            most = tl.maximum(most, tl.abs(xs[c].to(tl.float32)))
        scale, inverse = scale_of(tl.max(most, 0))
        for c in tl.static_range(C):
            q = (xs[c].to(tl.float32) * inverse).to(tl.float8e4nv, fp_downcast_rounding="rtne")
            qs = qs + _pairs(q.to(tl.float32), BK // 4)
        scales = (scale / _SMALL,)  # type: ignore[assignment]
    return qs, scales


@triton.jit
def _apply_block_scales(scales, ws_ptr, row, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """The row's scales times those of the weight blocks that row `row` of W is in."""
    GROUPS: tl.constexpr = (I + 127) // 128
    both = ()
    for c in tl.static_range(C):
        g = (c * BK + tl.arange(0, BK // 16) * 16) // 128
        ws = tl.load(ws_ptr + (row // 128) * GROUPS + g, g < GROUPS, 0.0)
        both = both + (scales[c] * ws,)  # type: ignore[assignment]
    return both


@triton.jit
def _word_element(words, J: tl.constexpr):
    """Number J of each word."""
    byte = ((words >> (8 * J)) & 0xFF).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _pair_element(pairs, J: tl.constexpr):
    """Number J of each pair."""
    return ((pairs >> (16 * J)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dot(tiles, qs, scales, BN: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
         BLOCKS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """C tiles of words times the row: [BN]. Without the assembly, in float32 throughout."""
    acc = tl.zeros([BN, BW // 4], tl.float32)
    for c in tl.static_range(C):
        first, second = qs[2 * c][None, :], qs[2 * c + 1][None, :]
        if ASM:
            parts = tl.inline_asm_elementwise(
                _FP8_DOT_ASM, _ASM_CONSTRAINTS, [tiles[c], first, second],
                dtype=tl.float32, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            parts = _word_element(tiles[c], 0) * _pair_element(first, 0) + _word_element(
                tiles[c], 1
            ) * _pair_element(first, 1)
            parts += _word_element(tiles[c], 2) * _pair_element(second, 0)
            parts += _word_element(tiles[c], 3) * _pair_element(second, 1)
        sums = tl.sum(tl.reshape(parts, (BN, BW // 4, 4)), 2)
        if BLOCKS:
            sums *= scales[c][None, :]
        acc += sums
    return tl.sum(acc, 1)


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
def load_tiles(w_ptr, n, k, O: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
          PAIR: tl.constexpr):  # fmt: skip
    """Rows n of W, and of its other half if there are two: tiles of both, one after the other."""
    tiles = _load_weight_words(w_ptr, n, k, O, W, BW, C)
    if PAIR:
        tiles = tiles + _load_weight_words(w_ptr + O * W, n, k, O, W, BW, C)
    return tiles


@triton.jit
def _multiply_and_store(tiles, qs, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr, O:
tl.constexpr,
          BIAS: tl.constexpr, BLOCKS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
          BW: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Multiply a band and store its results."""
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = _dot(tiles, qs, scales, BN, BW, C, BLOCKS, ASM)
    z = _scale_and_bias(z, n, n < O, scales[0], ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
    tl.store(z_ptr + n, z, n < O)
    if ACT is not None:
        u = _dot(tiles[C:], qs, up_scales, BN, BW, C, BLOCKS, ASM)
        u = _scale_and_bias(u, O + n, n < O, scales[0], ws_ptr, bias_ptr, BLOCKS, BIAS).to(dtype)
        tl.store(z_ptr + O + n, u, n < O)
        a = activate(z.to(tl.float32), ACT) * u.to(tl.float32)
        tl.store(a_ptr + n, a.to(dtype), n < O)


@kernel("eps", "offset")
def _gemv_fp8(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I / 4] words of e4m3, or [2 * O, I / 4] if ACT
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
    qs, own = _quantize_vector(xs, BK, C, BLOCKS)
    scales, up_scales = own, own
    if BLOCKS:  # a program's rows are in one block: BN * TIMES divides 128
        scales = _apply_block_scales(own, ws_ptr, first, I, BK, C)
        if PAIR:
            up_scales = _apply_block_scales(own, ws_ptr, O + first, I, BK, C)
    for _ in range(TIMES - 1):
        ahead = load_tiles(
            w_ptr, n + BN, word, O, W, BW, C, PAIR
        )  # in flight while these are summed
        _multiply_and_store(tiles, qs, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
              O, BIAS, BLOCKS, ACT, BN, BW, C, PDL)  # fmt: skip
        tiles = ahead
        n += BN
    _multiply_and_store(tiles, qs, scales, up_scales, n, ws_ptr, bias_ptr, z_ptr, a_ptr,
          O, BIAS, BLOCKS, ACT, BN, BW, C, PDL)  # fmt: skip


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, no static scale."""
    if not isinstance(weight, Fp8Weight) or weight.input_scale is not None or x.shape[0] != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1:
        return False
    outputs, inputs = weight.shape
    if inputs > MAX_INPUTS or inputs % 16 or (weight.block_size and outputs % (2 * BLOCK_SIZE)):
        return False
    return bias is None or bias.is_contiguous()


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
    weight: Fp8Weight,
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
        "e4m3", outputs, inputs, act is not None
    )
    assert rows * columns >= 512 * warps, "four words of a thread must be in one row"
    add = norm is not None and norm.residual is not None
    data, scale = weight.data.view(torch.int32), weight.scale
    out = None if act is None else act.out
    tensors: tuple[Tensor | None, ...] = (x, None, None, data, scale, bias, z, None, None, out)
    numbers = (0.0, 0.0)
    if norm is not None:
        r = norm.r if add else None
        tensors = (norm.x, norm.residual, norm.weight, data, scale, bias, z, norm.y, r, out)
        numbers = (norm.eps, norm.offset)
    _gemv_fp8(
        (cdiv(outputs, rows * times), 1, 1),
        tensors,
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None, bool(weight.block_size),
            None if act is None else act.kind, rows, columns, times,
            ahead or (memory_idle and times > 1), PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
