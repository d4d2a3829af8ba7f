"""Grouped small-M kernel: few rows times a weight of two to eight bits, and the activation.

    z = x W^T + bias        a = act(gate) * up

Time is the bytes of the weights. A warp has a band of rows of W and a range of the inputs; it loads
codes from memory into the registers from which the tensor cores take them, several blocks ahead, so
nothing passes through shared memory but the sums of the warps at the end. A thread takes eight
neighbours of a row where the instruction counts every other pair: W and x are read alike, so sums
have the same terms. Codes of a group are multiplied as integers, and its scale multiplies the sum.

A bank of experts is multiplied by single rows: a program has a pair of a token and its expert, and
a band of the rows of that expert's matrix.

The order of a sum depends on the plan alone, which depends on the shape of the weight and on the
number of rows rounded up to a power of two.

Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.formats.tiled_weight import TILE, TiledExperts, TiledWeight
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.grouped_decode import (
    decode_slice,
    load_factor,
    lookup_slices,
    magic_of,
)
from quire.kernels.gpu.linear.grouped_gemm import weight_constants, weight_tensors
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import gpu_target


@gluon.jit
def load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
               zero_ptr, o, j, m, row, step, live, BLOCKS: gl.constexpr, LOW: gl.constexpr,
               HIGH: gl.constexpr, NS: gl.constexpr, SK: gl.constexpr, COUNT: gl.constexpr,
               G: gl.constexpr, S_FORM: gl.constexpr, O_FORM: gl.constexpr):  # fmt: skip
    """What memory has of a block m [WK, 1, 1] for outputs o [1, BN, 1]: words, then numbers.

    row, step: o and m in the layout of the sums, [1, BN] and [WK, 1]. live: whether to load at all.
    """
    found = ()
    low_at = ((o // 64).to(gl.int64) * BLOCKS + m) * (NS * LOW // 16 * 64 * SK) + o % 64 * SK + j
    for i in gl.static_range(NS * LOW // 16):
        found = found + (
            gl.load(low_ptr + low_at + i * (64 * SK), live, eviction_policy="evict_first"),
        )
    if HIGH:
        high_at = ((o // 64).to(gl.int64) * BLOCKS + m) * (NS * HIGH // 16 * 64 * SK)
        high_at += o % 64 * SK + j
        for i in gl.static_range(NS * HIGH // 16):
            words = gl.load(high_ptr + high_at + i * (64 * SK), live, eviction_policy="evict_first")
            found = found + (words,)
    if COUNT > 0:
        for i in gl.static_range(COUNT):
            g = gl.minimum(step * COUNT + i, G - 1)
            if scale_ptr is not None:
                found = found + (load_factor(scale_ptr, scale_code_ptr, row, g, G, S_FORM),)
            if offset_ptr is not None:
                found = found + (load_factor(offset_ptr, offset_code_ptr, row, g, G, O_FORM),)
            if zero_ptr is not None:
                at = zero_ptr + (row // 64) * (64 * G) + row % 64 + g * 64
                found = found + (gl.load(at),)
    return found


@gluon.jit
def _multiply_block(acc, block, xs, minus, table, scaled: gl.constexpr, offset: gl.constexpr,
                    zeros: gl.constexpr, ZERO: gl.constexpr, TABLE: gl.constexpr,
                    LOW: gl.constexpr, HIGH: gl.constexpr, NS: gl.constexpr, PER: gl.constexpr,
                    GROUPED: gl.constexpr, A: gl.constexpr):  # fmt: skip
    """acc plus the product of a block's codes and its NS slices of x."""
    dtype: gl.constexpr = xs[0].dtype
    WORDS: gl.constexpr = NS * LOW // 16
    HIGHS: gl.constexpr = NS * HIGH // 16
    EACH: gl.constexpr = (1 if scaled else 0) + (1 if offset else 0) + (1 if zeros else 0)
    MAGIC: gl.constexpr = magic_of(LOW + HIGH, dtype == gl.bfloat16)
    low = block[:WORDS]
    high = block[WORDS : WORDS + HIGHS]
    numbers = block[WORDS + HIGHS :]
    part = acc
    sums = acc
    for s in gl.static_range(NS):
        if zeros and GROUPED and s % PER == 0:
            zero = numbers[s // PER * EACH + EACH - 1].to(gl.float32)
            minus = (-MAGIC - zero).to(dtype)
            minus = gl.convert_layout(minus, gl.SliceLayout(2, A))[:, :, None]
        if TABLE:
            if s % 4 == 0:
                four = lookup_slices(low[s // 4], table, dtype, True)
            w = four[s % 4]
        else:
            w = decode_slice(low, high, minus, s, LOW, HIGH, ZERO is None, True)
        if GROUPED and s % PER == 0:
            part = gl.zeros_like(acc)
        part = gl.nvidia.ampere.mma_v2(w, xs[s], part)
        if offset:
            ones = gl.full_like(w, 1.0)
            if s % PER == 0:
                sums = gl.zeros_like(acc)
            sums = gl.nvidia.ampere.mma_v2(ones, xs[s], sums)
        if GROUPED and s % PER == PER - 1:
            if scaled:
                acc += part * numbers[s // PER * EACH][:, :, None]
            else:
                acc += part
            if offset:
                acc += sums * numbers[s // PER * EACH + (1 if scaled else 0)][:, :, None]
    if GROUPED:
        return acc
    else:
        return part


@kernel("T", jit=gluon.jit)
def _grouped_small_m(
    x_ptr,  # [T, I]
    low_ptr,  # planes: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,  # [O] or [2 * O], or None; of each expert
    ids_ptr,  # [P] int32, the expert of each pair, or None: no bank of experts. -1: absent
    z_ptr,  # [T, O] or [T, 2 * O] out; None: only a is written
    a_ptr,  # [T, O] out if ACT
    T,
    O: gl.constexpr,
    I: gl.constexpr,
    X_T: gl.constexpr,
    BLOCKS: gl.constexpr,
    LOW: gl.constexpr,
    HIGH: gl.constexpr,
    NS: gl.constexpr,
    SK: gl.constexpr,
    GROUP: gl.constexpr,
    G: gl.constexpr,
    ZERO: gl.constexpr,
    S_FORM: gl.constexpr,
    O_FORM: gl.constexpr,
    OWN_TABLE: gl.constexpr,
    ACT: gl.constexpr,  # None, or a kind
    ROWS: gl.constexpr,  # of an expert's matrix, padding included
    K: gl.constexpr,  # pairs that share a row of x
    TP: gl.constexpr,  # rows of x of a program, 8 at least
    BN: gl.constexpr,
    WK: gl.constexpr,  # warps that share the inputs
    AHEAD: gl.constexpr,  # blocks that a warp loads ahead
    PDL: gl.constexpr,
):
    KW: gl.constexpr = SK // 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, KW)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, KW)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    TABLE: gl.constexpr = table_ptr is not None
    SCALED: gl.constexpr = scale_ptr is not None
    OFFSET: gl.constexpr = offset_ptr is not None
    ZEROS: gl.constexpr = zero_ptr is not None
    PAIR: gl.constexpr = ACT is not None
    GROUPED: gl.constexpr = GROUP > 0 or OFFSET
    PER: gl.constexpr = GROUP // SK if GROUP > 0 else NS
    COUNT: gl.constexpr = NS // PER if GROUPED else 0
    EACH: gl.constexpr = (BLOCKS + WK - 1) // WK
    STEPS: gl.constexpr = (EACH + AHEAD - 1) // AHEAD
    EXACT: gl.constexpr = EACH % AHEAD == 0 and BLOCKS % WK == 0 and I == BLOCKS * NS * SK
    MAGIC: gl.constexpr = magic_of(LOW + HIGH, dtype == gl.bfloat16)
    WIDTH: gl.constexpr = 2 * O if PAIR else O
    TOP: gl.constexpr = (WIDTH + 63) // 64 * 64 - 1

    first = gl.program_id(1) * BN
    base = 0
    if ids_ptr is not None:
        if PDL:
            launch_dependents()
            wait_for_previous_kernel()
        pair = gl.program_id(2)
        expert = gl.load(ids_ptr + pair)
        if expert < 0:
            return
        base = expert * ROWS
        x_ptr += pair // K * X_T
        if bias_ptr is not None:
            bias_ptr += expert * WIDTH
        if z_ptr is not None:
            z_ptr += pair * WIDTH
        if PAIR:
            a_ptr += pair * O
    warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None][:, :, None]
    o = first + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :][:, :, None]
    j = gl.arange(0, SK, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :][:, None, :]
    group = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None] * EACH
    row = first + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :]
    o_2 = gl.minimum(o + O, TOP) + base
    row_2 = gl.minimum(row + O, TOP) + base
    o = gl.minimum(o, TOP) + base
    row = gl.minimum(row, TOP) + base
    start = warp * EACH

    held = ()
    held_2 = ()
    for d in gl.static_range(AHEAD):
        m = gl.minimum(start + d, BLOCKS - 1)
        step = gl.minimum(group + d, BLOCKS - 1)
        held = held + (
            load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                       zero_ptr, o, j, m, row, step, True, BLOCKS, LOW, HIGH, NS, SK, COUNT, G,
                       S_FORM, O_FORM),
        )  # fmt: skip
        if PAIR:
            held_2 = held_2 + (
                load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                           offset_code_ptr, zero_ptr, o_2, j, m, row_2, step, True, BLOCKS, LOW,
                           HIGH, NS, SK, COUNT, G, S_FORM, O_FORM),
            )  # fmt: skip
    table = ()
    table_2 = ()
    if TABLE:
        for i in gl.static_range(8):
            entry = table_ptr + ((o // 64) * 512 + i * 64 + o % 64 if OWN_TABLE else o * 0 + i)
            table = table + (gl.load(entry),)
            if PAIR:
                entry = table_ptr + (
                    (o_2 // 64) * 512 + i * 64 + o_2 % 64 if OWN_TABLE else o * 0 + i
                )
                table_2 = table_2 + (gl.load(entry),)
    minus = (o * 0).to(gl.float32)
    if ZERO is not None:
        minus -= MAGIC + ZERO
    minus_2 = minus
    if ZEROS and not GROUPED:
        minus -= gl.load(zero_ptr + o).to(gl.float32)
        minus_2 -= gl.load(zero_ptr + o_2).to(gl.float32)
    minus = minus.to(dtype)
    minus_2 = minus_2.to(dtype)

    t = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    t = gl.minimum(t, T - 1)[None, :][:, None, :]
    k = gl.arange(0, SK, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :][:, :, None]
    x_warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None][:, :, None] * EACH
    x_at = x_ptr + t.to(gl.int64) * X_T + (x_warp * (NS * SK) + k)
    if PDL and ids_ptr is None:
        launch_dependents()
        wait_for_previous_kernel()
    acc = gl.zeros([WK, BN, TP], gl.float32, MMA)
    ups = acc
    for turn in range(STEPS):
        for d in gl.static_range(AHEAD):
            block = turn * AHEAD + d
            xs = ()
            for s in gl.static_range(NS):
                at = x_at + (block * (NS * SK) + s * SK)
                if EXACT:
                    xs = xs + (gl.load(at),)
                else:
                    column = (x_warp + block) * (NS * SK) + s * SK + k
                    live = (column < I) & (block < EACH) & (t >= 0)
                    xs = xs + (gl.load(at, live, 0.0),)
            acc = _multiply_block(acc, held[0], xs, minus, table, SCALED, OFFSET, ZEROS, ZERO,
                                  TABLE, LOW, HIGH, NS, PER, GROUPED, A)  # fmt: skip
            if PAIR:
                ups = _multiply_block(ups, held_2[0], xs, minus_2, table_2, SCALED, OFFSET, ZEROS,
                                      ZERO, TABLE, LOW, HIGH, NS, PER, GROUPED, A)  # fmt: skip
            if STEPS > 1:
                more = block + AHEAD < EACH
                m = gl.minimum(start + block + AHEAD, BLOCKS - 1)
                step = gl.minimum(group + block + AHEAD, BLOCKS - 1)
                held = held[1:] + (
                    load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                               offset_code_ptr, zero_ptr, o, j, m, row, step, more, BLOCKS, LOW,
                               HIGH, NS, SK, COUNT, G, S_FORM, O_FORM),
                )  # fmt: skip
                if PAIR:
                    held_2 = held_2[1:] + (
                        load_block(low_ptr, high_ptr, scale_ptr, scale_code_ptr, offset_ptr,
                                   offset_code_ptr, zero_ptr, o_2, j, m, row_2, step, more, BLOCKS,
                                   LOW, HIGH, NS, SK, COUNT, G, S_FORM, O_FORM),
                    )  # fmt: skip
            else:
                held = held[1:] + held[:1]
                held_2 = held_2[1:] + held_2[:1]
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    z = gl.sum(acc, 0)
    o_out = first + gl.arange(0, BN, gl.SliceLayout(1, SUM))
    t_out = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, SUM))
    row_out = gl.minimum(o_out, TOP) + base
    if SCALED and not GROUPED:
        z *= load_factor(scale_ptr, scale_code_ptr, row_out, 0, 1, S_FORM)[:, None]
    if bias_ptr is not None:
        z += gl.load(bias_ptr + o_out, o_out < O, 0.0).to(gl.float32)[:, None]
    live = (o_out < O)[:, None] & (t_out < T)[None, :]
    if z_ptr is not None:
        z = z.to(dtype)
        gl.store(z_ptr + t_out.to(gl.int64)[None, :] * WIDTH + o_out[:, None], z, live)
    if PAIR:
        up = gl.sum(ups, 0)
        row_out = gl.minimum(o_out + O, TOP) + base
        if SCALED and not GROUPED:
            up *= load_factor(scale_ptr, scale_code_ptr, row_out, 0, 1, S_FORM)[:, None]
        if bias_ptr is not None:
            up += gl.load(bias_ptr + O + o_out, o_out < O, 0.0).to(gl.float32)[:, None]
        if z_ptr is not None:
            up = up.to(dtype)
            gl.store(z_ptr + t_out.to(gl.int64)[None, :] * WIDTH + O + o_out[:, None], up, live)
        a = activate(z.to(gl.float32), ACT) * up.to(gl.float32)
        gl.store(a_ptr + t_out.to(gl.int64)[None, :] * O + o_out[:, None], a.to(dtype), live)


MAX_ROWS = 16
"""Rows up to which this kernel is faster than grouped_gemm.py."""

_HELD_REGISTERS = 64
"""Registers of a thread that hold words, at most: more of them leave fewer warps."""


class GroupedSmallMPlan(NamedTuple):
    """Split of a product.

    rows: of x of a program; outputs: of a program; deep: warps that share the inputs; ahead: blocks
    of inputs that a warp loads ahead.
    """

    rows: int
    outputs: int
    deep: int
    ahead: int


def plan_grouped_small_m(rows: int, weight: TiledWeight, pair: bool) -> GroupedSmallMPlan:
    """A warp loads its whole range at once if that fits its registers, else in equal turns."""
    tall = max(8, next_power_of_2(rows))
    per_block = weight.slices * weight.bits // 16 * weight.slice_width // 4  # of 16 outputs
    if pair:
        return GroupedSmallMPlan(tall, 16, 4, max(1, min(2, _HELD_REGISTERS // (4 * per_block))))
    if tall > 8 and weight.shape[0] >= 256 * TILE:
        return GroupedSmallMPlan(tall, 64, 4, 1)
    deep = 4 if weight.blocks <= 64 else 8
    if 0 < weight.group <= 64 and weight.scale is not None:
        # numbers of groups take as many registers as words
        one_number = weight.offset is None and weight.scale.codes is None
        if deep == 8:
            return GroupedSmallMPlan(tall, 16, deep, 2 if one_number else 1)
        if one_number and not weight.scale.value_form:
            return GroupedSmallMPlan(tall, 16, deep, max(1, min(4, _HELD_REGISTERS // per_block)))
    each, most = cdiv(weight.blocks, deep), max(1, _HELD_REGISTERS // per_block)
    ahead = cdiv(each, cdiv(each, most))
    wide = 16 if ahead == each or per_block > 8 else 32
    return GroupedSmallMPlan(tall, wide, deep, ahead)


def supports(x: Tensor, weight: object, bias: Tensor | None) -> bool:
    """Whether this kernel multiplies these rows: few, half precision, packed, on a GPU."""
    if not isinstance(weight, TiledWeight) or not 0 < x.shape[0] <= MAX_ROWS:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return False
    if x.stride(1) != 1 or gpu_target(x.device).capability < (8, 0):
        return False
    return bias is None or bias.is_contiguous()


def launch(
    z: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    act: FusedActivation | None = None,
    plan: GroupedSmallMPlan | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too. x's columns are as the codes'."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    tall, wide, deep, ahead = plan or plan_grouped_small_m(x.shape[0], weight, act is not None)
    _grouped_small_m(
        (cdiv(x.shape[0], tall), cdiv(outputs, wide), 1),
        (x, *weight_tensors(weight), bias, None, z, None if act is None else act.out),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), *weight_constants(weight),
            None if act is None else act.kind, 0, 1, tall, wide, deep, ahead, PDL_ENABLED,
        ),
        warps=deep,
        pdl=PDL_ENABLED,
    )  # fmt: skip


def launch_experts(
    y: Tensor,
    x: Tensor,
    ids: Tensor,
    experts: TiledExperts,
    bias: Tensor | None,
    act: str | None,
    plan: GroupedSmallMPlan | None = None,
) -> None:
    """y[p] = act(x[p // k] @ experts[ids[p]].T + bias[ids[p]]): y [P, O] of x [P / k, I].

    act: the kind of a gated activation, which halves the rows of a matrix; None: none.
    """
    bank, (pairs, outputs) = experts.bank, y.shape
    tall, wide, deep, ahead = plan or plan_grouped_small_m(1, bank, act is not None)
    z, a = (y, None) if act is None else (None, y)
    _grouped_small_m(
        (1, cdiv(outputs, wide), pairs),
        (x, *weight_tensors(bank), bias, ids, z, a),
        (1,),
        (
            outputs, x.shape[1], x.stride(0), *weight_constants(bank), act,
            bank.low.shape[0] // len(experts) * TILE, pairs // x.shape[0], tall, wide, deep, ahead,
            PDL_ENABLED,
        ),
        warps=deep,
        pdl=PDL_ENABLED,
    )  # fmt: skip
