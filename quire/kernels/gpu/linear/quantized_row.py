"""A row quantized in registers, and its products with words of four weights, for gemv_bytes.py.

    e4m3    scales of the row, or of its blocks of 128; sixteen products added in float16
    int8    one scale; sums of integers, four products an instruction

Axes: BK inputs of one of C tiles, BW = BK / 4 words, BN rows of weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.linear.quantize_fp8 import scale_of
from quire.kernels.gpu.linear.quantize_int8 import magnitude_bits, symmetric_codes

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
def _pairs(q, BW: tl.constexpr):
    """[4 * BW] numbers as the first and the second pair of float16 of each word."""
    even, odd = tl.split(tl.reshape((q * _SMALL).to(tl.float16), (BW, 2, 2)))
    even = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    both = even | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.split(both)


@triton.jit
def _quantize_e4m3(xs, BK: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr):
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
def apply_block_scales(scales, ws_ptr, row, I: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
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
def _dot_e4m3(tiles, qs, scales, BN: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
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
def _pack_words(codes, BW: tl.constexpr):
    """[4 * BW] codes as words of four bytes."""
    even, odd = tl.split(tl.reshape(codes.to(tl.int32) & 0xFF, (BW, 2, 2)))
    low, high = tl.split(even | (odd << 8))
    return low | (high << 16)


@triton.jit
def _quantize_int8(xs, BK: tl.constexpr, C: tl.constexpr):
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
def _dot_int8(tiles, words, BN: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, ASM: tl.constexpr):
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
def quantize_row(xs, BK: tl.constexpr, C: tl.constexpr, INT8: tl.constexpr, BLOCKS: tl.constexpr):
    """(the row for multiply_words(), its scales: C times [BK // 16] if BLOCKS, or one)."""
    if INT8:
        words, scale = _quantize_int8(xs, BK, C)
        return words, (scale,)
    else:
        return _quantize_e4m3(xs, BK, C, BLOCKS)


@triton.jit
def multiply_words(tiles, row, scales, BN: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
                   INT8: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """C tiles of words times the row: float32 [BN]. scales: applied here if BLOCKS."""
    if INT8:
        return _dot_int8(tiles, row, BN, BW, C, ASM).to(tl.float32)
    else:
        return _dot_e4m3(tiles, row, scales, BN, BW, C, BLOCKS, ASM)
