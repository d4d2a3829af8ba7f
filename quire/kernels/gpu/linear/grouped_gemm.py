"""GEMM kernel over weights of two to eight bits: y = x W^T + bias, W decoded in registers.

W is the left operand, which the tensor cores take from registers, so decoded weights are not
written to shared memory, and few rows of x are the narrow side. Codes of a group are multiplied as
integers; the group's scale multiplies its sum: one multiply-add per output and row, not per weight.
An offset adds the sum of the group's inputs, which a product with ones gives.

Where there are too few tiles to keep all memory busy, each is split along the inputs; the program
that finishes last adds the parts, in one order, so results do not depend on timing. The number of
rows changes at most how float32 sums are rounded: other tiles, another matrix instruction.

Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.tiled_weight import PLANES, TILE, TiledFactors, TiledWeight
from quire.kernels.gpu.linear.grouped_decode import (
    decode_slice,
    factor_form,
    load_factor,
    load_table,
    load_words,
    lookup_slices,
    magic_of,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

SMALL_M = 64
"""Rows up to which reading the weights takes most of the time."""


@triton.jit
def load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr, o, g,
                G: tl.constexpr, COUNT: tl.constexpr, ZERO: tl.constexpr, BITS: tl.constexpr,
                S_FORM: tl.constexpr, O_FORM: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """(scale, offset, minus) of COUNT groups from g, flat: float32 [BN], the last of dtype."""
    MAGIC: tl.constexpr = magic_of(BITS, dtype == tl.bfloat16)
    found = ()
    for i in tl.static_range(COUNT):
        at = tl.minimum(g + i, G - 1)
        scale = tl.full(o.shape, 1.0, tl.float32)
        offset = tl.zeros(o.shape, tl.float32)
        if scale_ptr is not None:
            scale = load_factor(scale_ptr, scale_code_ptr, o, at, G, S_FORM)
        if offset_ptr is not None:
            offset = load_factor(offset_ptr, offset_code_ptr, o, at, G, O_FORM)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + (o // 64) * (64 * G) + o % 64 + at * 64).to(tl.float32)
            minus = (-MAGIC - zero).to(dtype)
        elif ZERO is None:
            minus = tl.zeros(o.shape, dtype)
        else:
            minus = tl.full(o.shape, -MAGIC - ZERO, tl.float32).to(dtype)
        found = found + (scale, offset, minus)  # type: ignore[assignment]
    return found


@triton.jit
def multiply_block(acc, x_at, at, low, high, groups, table, I: tl.constexpr, LOW: tl.constexpr,
                   HIGH: tl.constexpr, NS: tl.constexpr, SK: tl.constexpr, PER: tl.constexpr,
                   SCALED: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
                   EXACT: tl.constexpr, E4M3: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """acc [BN, TP] plus the product of a block's codes and x.

    x_at: pointers [SK, TP] to the first slice. groups: of load_groups, one for PER slices each.
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    k = at + tl.arange(0, SK)
    part = acc
    sums = acc
    for s in tl.static_range(NS):
        if EXACT:
            x = tl.load(x_at + s * SK)
        else:
            x = tl.load(x_at + s * SK, (k + s * SK < I)[:, None], 0.0)
        if TABLE:
            if s % 4 == 0:
                four = lookup_slices(low[s // 4], table, dtype, ASM)
            w = four[s % 4]
        else:
            minus = groups[s // PER * 3 + 2][:, None]
            w = decode_slice(low, high, minus, s, LOW, HIGH, E4M3, ASM)
        if SCALED and s % PER == 0:
            part = tl.dot(w, x, input_precision="ieee")
        else:
            part = tl.dot(w, x, part, input_precision="ieee")
        if OFFSET:
            ones = tl.full(w.shape, 1.0, tl.float32).to(dtype)
            if s % PER == 0:
                sums = tl.dot(ones, x, input_precision="ieee")
            else:
                sums = tl.dot(ones, x, sums, input_precision="ieee")
        if SCALED and s % PER == PER - 1:
            acc += part * groups[s // PER * 3][:, None]
            if OFFSET:
                acc += sums * groups[s // PER * 3 + 1][:, None]
    if SCALED:
        return acc
    else:
        return part


@kernel("T")
def _grouped_gemm(
    x_ptr,  # [T, I]
    low_ptr,  # planes: see TiledWeight
    high_ptr,
    scale_ptr,
    scale_code_ptr,
    offset_ptr,
    offset_code_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    part_ptr,  # [row tiles, bands, PARTS, BN, TP] float32, written and read if PARTS > 1
    ticket_ptr,  # [bands] int32, zero before and after
    T,
    O: tl.constexpr,
    I: tl.constexpr,
    X_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    NS: tl.constexpr,
    SK: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    G: tl.constexpr,
    ZERO: tl.constexpr,  # None: codes are e4m3 floats
    S_FORM: tl.constexpr,
    O_FORM: tl.constexpr,
    OWN_TABLE: tl.constexpr,
    TP: tl.constexpr,  # rows of x of a program, 8 at least
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tile, band, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    TABLE: tl.constexpr = table_ptr is not None
    OFFSET: tl.constexpr = offset_ptr is not None
    SCALED: tl.constexpr = GROUP > 0 or OFFSET
    PER: tl.constexpr = GROUP // SK if GROUP > 0 else NS
    COUNT: tl.constexpr = NS // PER
    AHEAD: tl.constexpr = GROUP > 0 and COUNT <= 8  # more would not fit the registers
    EACH: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS
    EXACT: tl.constexpr = I == PARTS * EACH * NS * SK
    o = band * BN + tl.arange(0, BN)
    t = row_tile * TP + tl.arange(0, TP)
    w_row = tl.minimum(o, (O + 63) // 64 * 64 - 1)
    first = part * EACH
    groups = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr, zero_ptr, w_row,
                         first * COUNT if GROUP > 0 else 0, G, COUNT, ZERO, LOW + HIGH, S_FORM,
                         O_FORM, dtype)  # fmt: skip
    table = ()
    if TABLE:
        table = load_table(table_ptr, w_row, OWN_TABLE)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    rows = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * X_T
    k = tl.arange(0, SK)[:, None]
    acc = tl.zeros((BN, TP), tl.float32)
    for step in tl.range(0, EACH, num_stages=STAGES):
        m = first + step
        held = m if EXACT else tl.minimum(m, BLOCKS - 1)
        low = load_words(low_ptr, w_row, held, BLOCKS, NS * LOW // 16, SK, "evict_first")
        high = ()
        if HIGH:
            high = load_words(high_ptr, w_row, held, BLOCKS, NS * HIGH // 16, SK, "evict_first")
        following = groups
        if AHEAD:  # the next block's load while these are used
            following = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                                    zero_ptr, w_row, (m + 1) * COUNT, G, COUNT, ZERO, LOW + HIGH,
                                    S_FORM, O_FORM, dtype)  # fmt: skip
        elif GROUP > 0:
            groups = load_groups(scale_ptr, scale_code_ptr, offset_ptr, offset_code_ptr,
                                    zero_ptr, w_row, m * COUNT, G, COUNT, ZERO, LOW + HIGH,
                                    S_FORM, O_FORM, dtype)  # fmt: skip
        at = m * (NS * SK)
        acc = multiply_block(acc, rows + (at + k), at, low, high, groups, table, I, LOW, HIGH, NS,
                             SK, PER, SCALED, OFFSET, TABLE, EXACT, ZERO is None, ASM)  # fmt: skip
        groups = following
    if PARTS > 1:
        cell = tl.arange(0, BN)[:, None] * TP + tl.arange(0, TP)[None, :]
        parts = part_ptr + band.to(tl.int64) * (PARTS * BN * TP) + cell
        tl.store(parts + part * (BN * TP), acc)
        tl.debug_barrier()  # all of the part is written before the counter is increased
        if tl.atomic_add(ticket_ptr + band, 1, sem="acq_rel") != PARTS - 1:
            return
        acc = tl.zeros((BN, TP), tl.float32)
        for p in tl.static_range(PARTS):
            acc += tl.load(parts + p * (BN * TP), cache_modifier=".cg")
        tl.store(ticket_ptr + band, 0)
    if not SCALED:
        acc *= groups[0][:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o, o < O, 0.0).to(tl.float32)[:, None]
    y_at = y_ptr + t.to(tl.int64)[None, :] * O + o[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), (o < O)[:, None] & (t < T)[None, :])


class GroupedGemmPlan(NamedTuple):
    """Split of a product: rows of x and outputs of a program, parts, stages, warps."""

    rows: int
    outputs: int
    parts: int
    stages: int
    warps: int


def plan_grouped_gemm(rows: int, weight: TiledWeight) -> GroupedGemmPlan:
    """Tiles of 64 outputs, in parts where they are few: two programs for each multiprocessor.

    More rows: tiles of 128 by 128, which use each decoded weight 128 times.
    """
    stages = {4: 4, 8: 3, 16: 2}[weight.slices]
    if rows > SMALL_M:
        tall = 64 if weight.slices == 4 else 128
        return GroupedGemmPlan(tall, 2 * TILE, 1, min(stages, 3), 8)
    bands, width = cdiv(weight.shape[0], TILE), max(8, next_power_of_2(rows))
    if weight.slices == 16 and width > 32:
        return GroupedGemmPlan(32, TILE, 1, stages, 4)  # as many rows as fit the registers
    if bands >= 256 and weight.slices == 4:
        return GroupedGemmPlan(width, 2 * TILE, 1, 3, 4)
    most = max(1, min(8, (256 if width > 32 else 448) // bands, weight.shape[1] // 512))
    parts = next(n for n in range(most, 0, -1) if weight.blocks % n == 0 or n <= most // 2)
    return GroupedGemmPlan(width, TILE, parts, stages, 4)


def weight_tensors(weight: TiledWeight) -> tuple[Tensor | None, ...]:
    """The tensors of a weight in the order of the kernels' parameters."""

    def two(factors: TiledFactors | None) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if factors is None else (factors.values, factors.codes)

    zero = weight.zero if isinstance(weight.zero, Tensor) else None
    return (
        weight.low, weight.high, *two(weight.scale), *two(weight.offset), zero, weight.table_words,
    )  # fmt: skip


def weight_constants(weight: TiledWeight) -> tuple[Any, ...]:
    """BLOCKS to OWN_TABLE in the order of the kernels' parameters."""
    words = weight.table_words
    zero = 0 if isinstance(weight.zero, Tensor) else weight.zero
    return (
        weight.blocks, *PLANES[weight.bits], weight.slices, weight.slice_width, weight.group,
        weight.groups, None if weight.e4m3 else zero,
        factor_form(weight.scale), factor_form(weight.offset),
        words is not None and words.dim() > 1,
    )  # fmt: skip


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    plan: GroupedGemmPlan | None = None,
) -> None:
    """y [T, O] = x @ weight.T + bias; the columns of x are in the order of the codes."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    tall, wide, parts, stages, warps = plan or plan_grouped_gemm(rows, weight)
    row_tiles, bands = cdiv(rows, tall), cdiv(outputs, wide)
    assert parts == 1 or row_tiles == 1, "parts of a sum are counted for one tile of rows"
    sums = None
    if parts > 1:
        sums = torch.empty(bands * parts * wide * tall, dtype=torch.float32, device=y.device)
    _grouped_gemm(
        (row_tiles, bands, parts),
        (x, *weight_tensors(weight), bias, y, sums, weight.counters),
        (rows,),
        (
            outputs, inputs, x.stride(0), *weight_constants(weight), tall, wide, stages, parts,
            not _grouped_gemm.interpreted, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
