"""GEMV kernel over weights of two to eight bits: one row, with the ops before and after it.

    r = x + residual;  y = norm(r);  z = W y + bias;  a = act(gate) * up          as gemv.py

A code becomes a float32 in one or two instructions: its bits are masked in the mantissa of a number
in [1, 2), which is 1 + q * 2 ** (p - 23) for bits at place p, and the row is scaled by the inverse
power of two. A multiply-add takes it as it is. What the ones add does not depend on the output: it
is subtracted from the sum of four words, which the group's scale then multiplies. Fields at places
12 and above keep that sum exact to 2 ** -13 of a product, far below the rounding of the result.

Axes: I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.tiled_weight import PLANES, TILE, TiledWeight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation, FusedNorm
from quire.kernels.gpu.linear.grouped_decode import load_factor
from quire.kernels.gpu.linear.grouped_gemm import weight_constants, weight_tensors
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

MAX_INPUTS = 32768


@triton.constexpr_function
def field_shift(at: int, bits: int) -> int:
    """Right shift (negative: left) that takes bits at a place of a word into the mantissa."""
    return next(s for s in (0, 8, 16, -8, -16) if 12 <= at - s <= 23 - bits)


@triton.constexpr_function
def row_factor(at: int, bits: int, above: int) -> float:
    """What an input is multiplied by, for bits at a place of a word that count 2 ** above each."""
    place = next(at - s for s in (0, 8, 16, -8, -16) if 12 <= at - s <= 23 - bits)
    return 2.0 ** (23 - place + above)


_MASK_ASM = tl.constexpr("lop3.b32 $0, $1, $2, $3, 0xea;")
"""(words & mask) | constant."""


@triton.jit
def _mantissas(words, AT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Bits at a place of words as float32 numbers in [1, 2)."""
    SHIFT: tl.constexpr = field_shift(AT, BITS)
    if SHIFT >= 0:
        moved = words >> SHIFT
    else:
        moved = words << -SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << (AT - SHIFT)
    if ASM:  # of the plain form ptxas makes two instructions
        return tl.inline_asm_elementwise(
            _MASK_ASM, "=r,r,n,r", [moved, MASK, 0x3F800000], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _inputs_of(k, f, SK: tl.constexpr, FIELDS: tl.constexpr):
    """Inputs of field f of words k, whose halves are neighbours: [BW, 2]."""
    HALF: tl.constexpr = SK // 2
    first = (k // HALF * FIELDS + f) * SK + k % HALF * 2
    return first[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def _load_row(x_ptr, res_ptr, norm_ptr, perm_ptr, i, scale, offset, I: tl.constexpr,
              NORM: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Elements i of the row that the product reads, in float32; 0 past its end."""
    live = i < I
    if perm_ptr is not None:
        i = tl.load(perm_ptr + i, live, 0)
    x = tl.load(x_ptr + i, live, 0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if ADD:
        x = (x.to(tl.float32) + tl.load(res_ptr + i, live, 0.0).to(tl.float32)).to(dtype)
    if NORM:
        norm = tl.load(norm_ptr + i, live, 0.0).to(tl.float32)
        x = (x.to(tl.float32) * scale * (offset + norm)).to(dtype)
        x = tl.where(live, x.to(tl.float32), 0.0)
    return x.to(tl.float32)


@triton.jit
def _norm_scale(x_ptr, res_ptr, norm_ptr, y_ptr, r_ptr, eps, offset, I: tl.constexpr,
                BI: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """1 / rms of the row. The first program stores the normed row, and the sum, for others."""
    i = tl.arange(0, BI)
    live = i < I
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + i, live, 0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(res_ptr + i, live, 0.0).to(tl.float32)).to(dtype)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / I + eps)
    if tl.program_id(0) == 0:
        norm = tl.load(norm_ptr + i, live, 0.0).to(tl.float32)
        tl.store(y_ptr + i, (wide * scale * (offset + norm)).to(dtype), live)
        if ADD:
            tl.store(r_ptr + i, x, live)
    return scale


@triton.jit
def _scaled_row(x_ptr, res_ptr, norm_ptr, perm_ptr, k, scale, offset, I: tl.constexpr,
                NORM: tl.constexpr, ADD: tl.constexpr, SK: tl.constexpr, BITS: tl.constexpr,
                ABOVE: tl.constexpr, PER: tl.constexpr, BW: tl.constexpr,
                V: tl.constexpr):  # fmt: skip
    """The row as a plane of BITS bits, ABOVE bits from the lowest, multiplies it.

    (first, second) [BW] of each field, scaled; then what the ones add, and the sum of the inputs,
    [BW // V], of each group of PER fields.
    """
    FIELDS: tl.constexpr = 16 // BITS
    xs = ()
    sums = ()
    ones = tl.zeros([BW], tl.float32)
    plain = tl.zeros([BW], tl.float32)
    for f in tl.static_range(FIELDS):
        i = _inputs_of(k, f, SK, FIELDS)
        x = _load_row(x_ptr, res_ptr, norm_ptr, perm_ptr, i, scale, offset, I, NORM, ADD)
        first, second = tl.split(x)
        plain += first + second
        first = first * row_factor(f * BITS, BITS, ABOVE)
        second = second * row_factor(16 + f * BITS, BITS, ABOVE)
        ones += first + second
        xs = xs + (first, second)  # type: ignore[assignment]
        if f % PER == PER - 1:
            both = (
                tl.sum(tl.reshape(ones, (BW // V, V)), 1),
                tl.sum(tl.reshape(plain, (BW // V, V)), 1),
            )
            sums = sums + both  # type: ignore[assignment]
            ones = tl.zeros([BW], tl.float32)
            plain = tl.zeros([BW], tl.float32)
    return xs + sums


@triton.jit
def _load_plane(ptr, n, k, BLOCK_WORDS: tl.constexpr, W: tl.constexpr, SK: tl.constexpr,
                BW: tl.constexpr):  # fmt: skip
    """Rows n of a plane, in words of 32 bits: [BN, BW]."""
    HALF: tl.constexpr = SK // 2
    row = (n // 64).to(tl.int64) * (BLOCK_WORDS * 64 * HALF) + n % 64 * HALF
    at = ptr + row[:, None] + (k // HALF * (64 * HALF) + k % HALF)[None, :]
    if W == BW:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, (k < W)[None, :], 0, eviction_policy="evict_first")


@triton.jit
def _dot_plane(words, xs, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr, n,
               G: tl.constexpr, ZERO: tl.constexpr, S_FORM: tl.constexpr, O_FORM: tl.constexpr,
               WHOLE: tl.constexpr, LOWEST: tl.constexpr, SK: tl.constexpr, BITS: tl.constexpr,
               PER: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, V: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
    """A plane of rows n times the row: [BN]. Zeros and offsets are those of the lowest plane."""
    FIELDS: tl.constexpr = 16 // BITS
    COUNT: tl.constexpr = FIELDS // PER
    HALF: tl.constexpr = SK // 2
    chunk = tl.arange(0, BW // V) * V // HALF * COUNT
    total = tl.zeros([BN, BW // V], tl.float32)
    for c in tl.static_range(COUNT):
        part = tl.zeros([BN, BW], tl.float32)
        for j in tl.static_range(2 * PER):
            value = _mantissas(words, (c * PER + j // 2) * BITS + j % 2 * 16, BITS, ASM)
            part += value * xs[2 * c * PER + j][None, :]
        ones, plain = xs[2 * FIELDS + 2 * c], xs[2 * FIELDS + 2 * c + 1]
        sums = tl.sum(tl.reshape(part, (BN, BW // V, V)), 2) - ones[None, :]
        g = tl.minimum(chunk + c, G - 1)[None, :]
        rows = n[:, None]
        if LOWEST:
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + (rows // 64) * (64 * G) + rows % 64 + g * 64)
                sums -= zero.to(tl.float32) * plain[None, :]
            elif ZERO != 0:
                sums -= ZERO * plain[None, :]
        if scale_ptr is not None and not WHOLE:
            sums *= load_factor(scale_ptr, scale_code_ptr, rows, g, G, S_FORM)
        if offset_ptr is not None and LOWEST:
            sums += load_factor(offset_ptr, offset_code_ptr, rows, g, G, O_FORM) * plain[None, :]
        total += sums
    return tl.sum(total, 1)


@triton.jit
def _multiply_rows(low, high, xs, ys, n, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                   zero_ptr, bias_ptr, G: tl.constexpr, ZERO: tl.constexpr, S_FORM: tl.constexpr,
                   O_FORM: tl.constexpr, WHOLE: tl.constexpr, SK: tl.constexpr, LOW: tl.constexpr,
                   HIGH: tl.constexpr, PER: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
                   BW_HIGH: tl.constexpr, V: tl.constexpr, V_HIGH: tl.constexpr,
                   ASM: tl.constexpr):  # fmt: skip
    """Rows n of W times the row, plus the bias: [BN] float32."""
    z = _dot_plane(low, xs, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr, n, G,
                   ZERO, S_FORM, O_FORM, WHOLE, True, SK, LOW, PER, BN, BW, V, ASM)  # fmt: skip
    if HIGH:
        z += _dot_plane(high, ys, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr,
                        n, G, ZERO, S_FORM, O_FORM, WHOLE, False, SK, HIGH, PER, BN, BW_HIGH,
                        V_HIGH, ASM)  # fmt: skip
    if scale_ptr is not None and WHOLE:
        z *= load_factor(scale_ptr, scale_code_ptr, n, 0, 1, S_FORM)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + n).to(tl.float32)
    return z


@kernel("eps", "offset")
def _grouped_gemv(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    perm_ptr,  # [I] int32 or None
    low_ptr,  # planes as words of 32 bits: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    bias_ptr,  # [O] or [2 * O], or None
    z_ptr,  # [O] or [2 * O] out
    y_ptr,  # [I] out if NORM
    r_ptr,  # [I] out if ADD
    a_ptr,  # [O] out if ACT
    eps,
    offset,
    O: tl.constexpr,
    I: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    NS: tl.constexpr,
    SK: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    ZERO: tl.constexpr,
    S_FORM: tl.constexpr,
    O_FORM: tl.constexpr,
    OWN_TABLE: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    BN: tl.constexpr,
    BW: tl.constexpr,
    BI: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    WHOLE: tl.constexpr = GROUP == 0
    # groups of a whole row are summed as if they were of 128
    PER: tl.constexpr = GROUP // SK if GROUP > 0 else 4
    LOW_WORDS: tl.constexpr = BLOCKS * (NS * LOW // 16)
    HIGH_WORDS: tl.constexpr = BLOCKS * (NS * HIGH // 16)
    BW_HIGH: tl.constexpr = BW * HIGH // LOW if HIGH else BW
    V_HIGH: tl.constexpr = 4 * HIGH // LOW if HIGH else 4
    n = tl.minimum(tl.program_id(0) * BN + tl.arange(0, BN), O - 1)
    k = tl.arange(0, BW)
    j = tl.arange(0, BW_HIGH)
    low = _load_plane(low_ptr, n, k, LOW_WORDS, LOW_WORDS * SK // 2, SK, BW)
    high = low
    if HIGH:
        high = _load_plane(high_ptr, n, j, HIGH_WORDS, HIGH_WORDS * SK // 2, SK, BW_HIGH)
    if ACT is not None:
        low_2 = _load_plane(low_ptr, n + O, k, LOW_WORDS, LOW_WORDS * SK // 2, SK, BW)
        high_2 = low_2
        if HIGH:
            high_2 = _load_plane(high_ptr, n + O, j, HIGH_WORDS, HIGH_WORDS * SK // 2, SK, BW_HIGH)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    scale = 1.0
    if NORM:
        scale = _norm_scale(x_ptr, res_ptr, norm_ptr, y_ptr, r_ptr, eps, offset, I, BI, ADD)
    xs = _scaled_row(x_ptr, res_ptr, norm_ptr, perm_ptr, k, scale, offset, I, NORM, ADD, SK, LOW, 0,
                     PER, BW, 4)  # fmt: skip
    ys = xs
    if HIGH:
        ys = _scaled_row(x_ptr, res_ptr, norm_ptr, perm_ptr, j, scale, offset, I, NORM, ADD, SK,
                         HIGH, LOW, PER, BW_HIGH, V_HIGH)  # fmt: skip
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = _multiply_rows(low, high, xs, ys, n, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                       zero_ptr, bias_ptr, G, ZERO, S_FORM, O_FORM, WHOLE, SK, LOW, HIGH, PER, BN,
                       BW, BW_HIGH, 4, V_HIGH, ASM).to(dtype)  # fmt: skip
    tl.store(z_ptr + n, z)
    if ACT is not None:
        up = _multiply_rows(low_2, high_2, xs, ys, n + O, scale_ptr, scale_code_ptr, offset_ptr,
                            offset_code_ptr, zero_ptr, bias_ptr, G, ZERO, S_FORM, O_FORM, WHOLE, SK,
                            LOW, HIGH, PER, BN, BW, BW_HIGH, 4, V_HIGH, ASM).to(dtype)  # fmt: skip
        tl.store(z_ptr + O + n, up)
        a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(a_ptr + n, a.to(dtype))


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies this row: half precision, packed, codes without a table."""
    if not isinstance(weight, TiledWeight) or weight.table is not None or x.shape[0] != 1:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return False
    if x.stride(1) != 1 or weight.shape[1] > MAX_INPUTS:
        return False
    return bias is None or bias.is_contiguous()


class GroupedGemvPlan(NamedTuple):
    """Split of a product: rows of W of a program, words of the low plane at once, warps."""

    rows: int
    words: int
    warps: int


def plan_grouped_gemv(weight: TiledWeight, outputs: int, pair: bool) -> GroupedGemvPlan:
    """A thread has four words of a row in a load of 16 bytes, and up to 32 words in all."""
    low, _ = PLANES[weight.bits]
    words = next_power_of_2(weight.blocks * weight.slices * weight.slice_width * low // 32)
    warps = max(1, min(16, words // 128))
    rows = 8
    each = words // (32 * warps) * (2 if pair else 1) * weight.bits // low
    while rows > 1 and (rows * each > 32 or outputs < 256 * rows):
        rows //= 2
    return GroupedGemvPlan(max(rows, 128 * warps // words), words, warps)


def launch(
    z: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    plan: GroupedGemvPlan | None = None,
) -> None:
    """z [1, O] = weight @ x; with a norm, x is the norm's input. Fills norm's and act's results."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    rows, words, warps = plan or plan_grouped_gemv(weight, outputs, act is not None)
    assert TILE % rows == 0, rows
    add = norm is not None and norm.residual is not None
    _, high, *factors, _ = weight_tensors(weight)
    planes = (weight.low.view(torch.int32), None if high is None else high.view(torch.int32))
    given: tuple[Tensor | None, ...] = (x, None, None)
    made: tuple[Tensor | None, ...] = (None, None)
    numbers = (0.0, 0.0)
    if norm is not None:
        given, made = (norm.x, norm.residual, norm.weight), (norm.y, norm.r if add else None)
        numbers = (norm.eps, norm.offset)
    _grouped_gemv(
        (cdiv(outputs, rows), 1, 1),
        (*given, weight.perm, *planes, *factors, bias, z, *made, None if act is None else act.out),
        numbers,
        (
            outputs, inputs, *weight_constants(weight), norm is not None, add,
            None if act is None else act.kind, rows, words, next_power_of_2(inputs),
            not _grouped_gemv.interpreted, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
