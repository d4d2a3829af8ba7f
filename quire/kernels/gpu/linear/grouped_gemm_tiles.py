"""Grouped GEMM of 4 bits on Hopper for many rows: programs take tiles in turn.

    y = x W^T + bias

A tile is 128 outputs by up to 256 rows. The copy engine brings codes and rows of x to shared
memory, some blocks ahead, and goes on to the next tile while this one is stored. Each warpgroup
has 64 outputs: it takes codes as the matrix instruction wants its left operand, decodes them in
registers, and multiplies them by all rows of the tile. While one decodes, another multiplies.
Weights are scaled and rounded once, from float32, before they are multiplied: the numbers are those
that grouped_widen.py writes. So sums stay in the matrix unit's registers for a whole tile.

Where there are too few tiles to keep the device busy, each is split along the inputs; the program
that finishes last adds the parts, in one order, so results do not depend on timing.

Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.formats.tiled_weight import TILE, TiledWeight
from quire.kernels.gpu.linear.grouped_decode import factor_form, float_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import gpu_target, sm_count

BLOCK = gl.constexpr(128)  # inputs of a block: four slices of 32


@gluon.constexpr_function
def _decode_asm(at: int, bf16: bool) -> str:
    """Operands: two numbers out, two words, the scale twice, -(128 + zero) * scale twice.

    128 + q are the upper halves of float32 numbers; the product and the sum are exact.
    """
    kind = "bf16x2" if bf16 else "f16x2"
    text = "{ .reg .b32 t, m, a, b; mov.b32 m, 0x43004300; "
    text += f"shr.b32 t, $1, {at}; lop3.b32 t, t, 0x000f000f, m, 0xea; "
    text += "shl.b32 a, t, 16; and.b32 b, t, 0xffff0000; "
    text += "fma.rn.f32 a, a, $2, $4; fma.rn.f32 b, b, $3, $5; "
    return text + f"cvt.rn.{kind}.f32 $0, b, a; }}"


@gluon.jit
def _decode_half(words, scale, minus, x, H: gl.constexpr, A: gl.constexpr):
    """Slices 2 H and 2 H + 1 of a block: [64, 64]. scale, minus: [64, 32] float32."""
    low: gl.constexpr = _decode_asm(8 * H, x.dtype == gl.bfloat16)
    high: gl.constexpr = _decode_asm(8 * H + 4, x.dtype == gl.bfloat16)
    a = gl.inline_asm_elementwise(
        low, "=r,r,f,f,f,f", [words, scale, minus], dtype=x.dtype, is_pure=True, pack=2
    )
    b = gl.inline_asm_elementwise(
        high, "=r,r,f,f,f,f", [words, scale, minus], dtype=x.dtype, is_pure=True, pack=2
    )
    both = gl.permute(gl.join(a, b), [0, 2, 1])
    return gl.convert_layout(gl.reshape(both, [64, 64]), A, assert_trivial=True)


@gluon.jit
def _place(item, rows, whole, BLOCKS: gl.constexpr, PARTS: gl.constexpr):
    """(tile of rows, band of outputs, whether it is a part, first block, blocks) of an item.

    Items are whole tiles, then parts of tiles. Programs beside each other share codes.
    """
    if PARTS == 1:
        return item % rows, item // rows, item < 0, item * 0, item * 0 + BLOCKS
    else:
        EACH: gl.constexpr = BLOCKS // PARTS
        split = item >= whole
        at = gl.where(split, whole + (item - whole) // PARTS, item)
        first = gl.where(split, (item - whole) % PARTS * EACH, 0)
        return at % rows, at // rows, split, first, gl.where(split, EACH, BLOCKS)


@gluon.jit
def _load(x_tiles, w_tiles, x, w, full, empty, T, whole, BLOCKS: gl.constexpr, BANDS: gl.constexpr,
          TP: gl.constexpr, HIGH: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """The warp that starts the copies of all items of a program."""
    BYTES: gl.constexpr = TP * BLOCK * 2 + HIGH * 4096
    rows = (T + TP - 1) // TP
    items = whole + (rows * BANDS - whole) * PARTS
    _tile, band, _split, first, _steps = _place(gl.program_id(0), rows, whole, BLOCKS, PARTS)
    for s in gl.static_range(STAGES):  # codes are not written by the previous kernel
        mbarrier.expect(full.index(s), BYTES)
        for i in gl.static_range(HIGH):
            at = ((band * HIGH + i) * BLOCKS + first + s) * 64
            tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(s),
                                            w.index(s * HIGH + i))  # fmt: skip
    if PDL:
        wait_for_previous_kernel()
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, band, _split, first, steps = _place(item, rows, whole, BLOCKS, PARTS)
        for block in range(first, first + steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            more = count >= STAGES
            mbarrier.expect(full.index(stage), BYTES, pred=more)
            for i in gl.static_range(HIGH):
                at = ((band * HIGH + i) * BLOCKS + block) * 64
                tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(stage),
                                                w.index(stage * HIGH + i), pred=more)  # fmt: skip
            for h in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_tiles, [tile * TP, block * BLOCK + h * 64], full.index(stage),
                    x.index(stage * 2 + h),
                )  # fmt: skip
            count += 1


@gluon.jit
def _factors(scale_ptr, zero_ptr, row, block, G: gl.constexpr, SHARE: gl.constexpr):
    """(scale, zero) of a block's group for rows [64] of a tile, as they are in memory."""
    S: gl.constexpr = (G + SHARE - 1) // SHARE
    g = gl.minimum(block, G - 1)
    found = (gl.load(scale_ptr + row // 64 * (64 * S) + g // SHARE * 64 + row % 64),)
    if zero_ptr is not None:
        found = found + (gl.load(zero_ptr + row // 64 * (64 * G) + g * 64 + row % 64),)
    return found


@gluon.jit
def _numbers(factors, shape: gl.constexpr, ZERO: gl.constexpr, FORM: gl.constexpr):
    """Scale and -(128 + zero) * scale, [64, 32] float32."""
    scale = float_of(factors[0], FORM)
    if ZERO is None:
        minus = scale * (-128.0 - factors[1].to(gl.float32))
    else:
        minus = scale * (-128.0 - ZERO)
    scale, minus = gl.expand_dims(scale, 1), gl.expand_dims(minus, 1)
    return scale.broadcast_to(shape), minus.broadcast_to(shape)


@gluon.jit
def _multiply(scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full, empty, turn,
              T, whole, WHICH: gl.constexpr, O: gl.constexpr, BLOCKS: gl.constexpr,
              BANDS: gl.constexpr, G: gl.constexpr, ZERO: gl.constexpr, SHARE: gl.constexpr,
              FORM: gl.constexpr, TP: gl.constexpr, HIGH: gl.constexpr, PARTS: gl.constexpr,
              STAGES: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """A warpgroup that multiplies 64 outputs of each tile by all rows of it."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TP, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    EACH_HIGH: gl.constexpr = HIGH // 2
    rows = (T + TP - 1) // TP
    items = whole + (rows * BANDS - whole) * PARTS
    o = gl.arange(0, 64, gl.SliceLayout(1, A))
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, band, split, first, steps = _place(item, rows, whole, BLOCKS, PARTS)
        sums, held = (), ()
        for n in gl.static_range(EACH_HIGH):
            row = (band * HIGH + WHICH * EACH_HIGH + n) * 64 + o
            held = held + (_factors(scale_ptr, zero_ptr, row, first, G, SHARE),)
            sums = sums + (gl.zeros([64, TP], gl.float32, ACC),)
        for block in range(first, first + steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            later, done = (), ()
            for n in gl.static_range(EACH_HIGH):
                words = w.index(stage * HIGH + WHICH * EACH_HIGH + n).load(A)
                scale, minus = _numbers(held[n], words.shape, ZERO, FORM)
                row = (band * HIGH + WHICH * EACH_HIGH + n) * 64 + o
                later = later + (_factors(scale_ptr, zero_ptr, row, block + 1, G, SHARE),)
                acc = sums[n]
                for h in gl.static_range(2):
                    weights = _decode_half(words, scale, minus, x, h, A)
                    if TURNS and n + h == 0:
                        mbarrier.wait(turn.index(WHICH), (count & 1) ^ (1 - WHICH))
                    rows_of_x = x.index(stage * 2 + h).permute((1, 0))
                    acc = warpgroup_mma(weights, rows_of_x, acc, is_async=True)
                done = done + (acc,)
            if TURNS:
                mbarrier.arrive(turn.index(1 - WHICH), count=1)
            if EACH_HIGH == 1:
                sums = (warpgroup_mma_wait(0, deps=[done[0]]),)
            else:
                sums = warpgroup_mma_wait(0, deps=[done[0], done[1]])
            held = later
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        for n in gl.static_range(EACH_HIGH):
            mine = band * HIGH + WHICH * EACH_HIGH + n
            if PARTS == 1:
                _store_rows(y_ptr, bias_ptr, sums[n], mine, tile, T, O, TP, ACC)
            elif split:
                part = first // (BLOCKS // PARTS)
                place = (band * rows + tile - whole) * HIGH + WHICH * EACH_HIGH + n
                _add_part(bias_ptr, y_ptr, part_ptr, ticket_ptr, sums[n], mine, tile, part, place,
                          T, O, TP, PARTS, ACC)  # fmt: skip
            else:
                _store_rows(y_ptr, bias_ptr, sums[n], mine, tile, T, O, TP, ACC)


@gluon.jit
def _add_part(bias_ptr, y_ptr, part_ptr, ticket_ptr, acc, mine, tile, part, place, T,
              O: gl.constexpr, TP: gl.constexpr, PARTS: gl.constexpr,
              ACC: gl.constexpr):  # fmt: skip
    """Keep the sums of a part. Whoever keeps the last one stores the sum of all."""
    o_in = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    t_in = gl.arange(0, TP, gl.SliceLayout(0, ACC))
    parts = part_ptr + place.to(gl.int64) * (PARTS * 64 * TP) + o_in[:, None] * TP + t_in[None, :]
    gl.store(parts + part * (64 * TP), acc)
    gl.thread_barrier()  # all of the part is written before the counter is increased
    # a counter has four bits for each tile of rows
    before = gl.atomic_add(ticket_ptr + mine, 1 << (4 * tile), sem="acq_rel")
    if (before >> (4 * tile) & 15) == PARTS - 1:
        acc = gl.zeros([64, TP], gl.float32, ACC)
        for p in gl.static_range(PARTS):
            acc += gl.load(parts + p * (64 * TP), cache_modifier=".cg")
        gl.atomic_add(ticket_ptr + mine, -(PARTS << (4 * tile)), sem="relaxed")
        _store_rows(y_ptr, bias_ptr, acc, mine, tile, T, O, TP, ACC)


@gluon.jit
def _store_rows(y_ptr, bias_ptr, acc, mine, tile, T, O: gl.constexpr, TP: gl.constexpr,
                ACC: gl.constexpr):  # fmt: skip
    """Outputs of a warp stay in it: only its threads exchange numbers."""
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    if bias_ptr is not None:
        o_acc = mine * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        acc += gl.load(bias_ptr + o_acc).to(gl.float32)[:, None]
    y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), LINES)
    o = mine * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    t = tile * TP + gl.arange(0, TP, gl.SliceLayout(0, LINES))
    gl.store(y_ptr + t.to(gl.int64)[None, :] * O + o[:, None], y, (t < T)[None, :])


@kernel("T", "whole", jit=gluon.jit)
def _grouped_gemm_tiles(
    scale_ptr,  # factors of groups: see TiledFactors
    zero_ptr,
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    part_ptr,  # [split tiles, HIGH, PARTS, 64, TP] float32, written and read if PARTS > 1
    ticket_ptr,  # [tiles of outputs] int32, zero before and after
    x_tiles,  # descriptor of [T, I], tiles [TP, 64]
    w_tiles,  # descriptor of the codes as [., 32], tiles [64, 32]
    T,
    whole,  # tiles that are not split, if PARTS > 1
    O: gl.constexpr,
    BLOCKS: gl.constexpr,
    G: gl.constexpr,
    ZERO: gl.constexpr,  # None: zeros are tensors
    SHARE: gl.constexpr,
    FORM: gl.constexpr,
    TP: gl.constexpr,  # rows of x of a tile
    HIGH: gl.constexpr,  # tiles of 64 outputs: two or four
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,  # whether warpgroups start their products in turn
    PDL: gl.constexpr,
):
    BANDS: gl.constexpr = O // (HIGH * 64)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    x = gl.allocate_shared_memory(dtype, [STAGES * 2, TP, 64], gl.NVMMASharedLayout(128, 16))
    w = gl.allocate_shared_memory(gl.int16, [STAGES * HIGH, 64, 32], gl.NVMMASharedLayout(64, 16))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full,
                         empty, turn, T, whole, 0, O, BLOCKS, BANDS, G, ZERO, SHARE, FORM, TP,
                         HIGH, PARTS, STAGES, TURNS)),
            (_multiply, (scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full,
                         empty, turn, T, whole, 1, O, BLOCKS, BANDS, G, ZERO, SHARE, FORM, TP,
                         HIGH, PARTS, STAGES, TURNS)),
            (_load, (x_tiles, w_tiles, x, w, full, empty, T, whole, BLOCKS, BANDS, TP, HIGH, PARTS,
                     STAGES, PDL)),
        ],
        [4, 1],
        [232, 32],
    )  # fmt: skip


class GroupedTilesPlan(NamedTuple):
    """Split of a product.

    rows: of x of a tile; outputs: of a tile, 128 or 256; parts: of the inputs; tail: whole tiles
    come first, in full rounds of all programs, and only the others are split; stages; turns:
    warpgroups multiply in turn.
    """

    rows: int
    outputs: int
    parts: int
    tail: bool
    stages: int
    turns: bool


def supports(x: Tensor, weight: TiledWeight) -> bool:
    """Whether this kernel multiplies these rows: 65 to 1,024, 4 bits, groups of 128, no table."""
    if not 64 < x.shape[0] <= 1024:
        return False
    if x.dtype != weight.dtype or gpu_target(x.device).capability != (9, 0):
        return False
    scale = weight.scale
    plain = weight.bits == 4 and weight.group in (0, BLOCK.value) and weight.table is None
    plain = plain and weight.offset is None and scale is not None and scale.codes is None
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return plain and aligned and weight.shape[0] % (2 * TILE) == 0 and weight.blocks > 2


def plan_grouped_tiles(rows: int, weight: TiledWeight, sms: int) -> GroupedTilesPlan:
    """The split that takes the fewest cycles by count: see _cycles. It changes at 128 rows."""
    rows = cdiv(rows, 128) * 128
    return min(
        (
            GroupedTilesPlan(tall, wide, parts, tail, stages, True)
            for tall, wide, stages in ((128, 256, 4), (256, 128, 3), (128, 128, 5))
            for parts in (1, 2, 3, 4, 6, 8)
            for tail in ((False, True) if parts > 1 else (False,))
            if not weight.shape[0] % wide
            and not weight.blocks % parts
            and weight.blocks // parts >= stages
            and (parts == 1 or cdiv(rows, tall) <= 8)
        ),
        key=lambda plan: _cycles(rows, plan, weight.shape[0], weight.blocks, sms),
    )


def _cycles(rows: int, plan: GroupedTilesPlan, outputs: int, blocks: int, sms: int) -> float:
    """Of the matrix units or of copies, plus those of sums that are stored and parts added."""
    size = plan.rows * plan.outputs
    tiles = cdiv(rows, plan.rows) * (outputs // plan.outputs)
    whole = _whole_tiles(plan, tiles, sms)
    step = max(size / 15, (plan.rows * 256 + plan.outputs * 64) / 28)
    found = cdiv(whole, sms) * (blocks * step + size / 8)
    if tiles > whole:
        ends = size / 8 + size / 6 + plan.parts * size / 10
        found += cdiv((tiles - whole) * plan.parts, sms) * (blocks // plan.parts * step + ends)
    return found


def _whole_tiles(plan: GroupedTilesPlan, tiles: int, sms: int) -> int:
    if plan.parts == 1:
        return tiles
    return tiles // sms * sms if plan.tail else 0


def launch(
    y: Tensor,
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    plan: GroupedTilesPlan | None = None,
) -> None:
    """y [T, O] = x @ weight.T + bias; the columns of x are in the order of the codes."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    sms = sm_count(x.device)
    plan = plan or plan_grouped_tiles(rows, weight, sms)
    tall, wide, parts, _, stages, turns = plan
    row_tiles = cdiv(rows, tall)
    assert parts == 1 or row_tiles <= 8, "a counter has four bits for each tile of rows"
    assert weight.blocks % parts == 0, plan
    assert weight.blocks // parts >= stages, plan
    tiles = row_tiles * (outputs // wide)
    whole = _whole_tiles(plan, tiles, sms)
    sums = None
    if parts > 1:
        count = (tiles - whole) * parts * wide * tall
        sums = torch.empty(count, dtype=torch.float32, device=y.device)
    x_tiles = TensorDescriptor(
        x, [rows, inputs], [x.stride(0), 1], [tall, 64], gl.NVMMASharedLayout(128, 16)
    )
    low = weight.low.view(-1, 32)
    w_tiles = TensorDescriptor(
        low, list(low.shape), [32, 1], [64, 32], gl.NVMMASharedLayout(64, 16)
    )
    assert weight.scale is not None, "see supports"
    zero, form = weight.zero, factor_form(weight.scale)
    _grouped_gemm_tiles(
        (min(sms, whole + (tiles - whole) * parts), 1, 1),
        (
            weight.scale.values, zero if isinstance(zero, Tensor) else None, bias, y, sums,
            weight.counters,
        ),
        (rows, whole),
        (
            outputs, weight.blocks, weight.groups, None if isinstance(zero, Tensor) else zero,
            form // 16, form // 4 % 4, tall, wide // TILE, parts, stages, turns,
            PDL_ENABLED,
        ),
        pdl=PDL_ENABLED,
        tiles=(x_tiles, w_tiles),
        maxnreg=168,
    )  # fmt: skip
