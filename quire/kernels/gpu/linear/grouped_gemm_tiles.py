"""Grouped GEMM of 4 bits on Hopper for many rows: programs take tiles in turn.

    y = x W^T + bias

A tile is 128 outputs by up to 256 rows. The copy engine brings codes and rows of x to shared
memory, some blocks ahead, and those of the next tile while this one is stored. Each warpgroup
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

from quire.kernels.formats.tiled_weight import TILE, TiledWeight
from quire.kernels.gpu.linear.grouped_decode import factor_form, float_of
from quire.kernels.gpu.linear.grouped_sums import (
    BLOCK,
    decodes_in_registers,
    describe_codes,
    describe_rows,
    load_factors,
    store_rows,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import gpu_target, sm_count


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
          TP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """The warp that starts the copies of all items of a program."""
    BYTES: gl.constexpr = TP * BLOCK * 2 + 2 * 4096
    rows = (T + TP - 1) // TP
    items = whole + (rows * BANDS - whole) * PARTS
    _tile, band, _split, first, _steps = _place(gl.program_id(0), rows, whole, BLOCKS, PARTS)
    for s in gl.static_range(STAGES):  # codes are not written by the previous kernel
        mbarrier.expect(full.index(s), BYTES)
        for i in gl.static_range(2):
            at = ((band * 2 + i) * BLOCKS + first + s) * 64
            tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(s),
                                            w.index(s * 2 + i))  # fmt: skip
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
            for i in gl.static_range(2):
                at = ((band * 2 + i) * BLOCKS + block) * 64
                tma.async_copy_global_to_shared(w_tiles, [at, 0], full.index(stage),
                                                w.index(stage * 2 + i), pred=more)  # fmt: skip
            for h in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_tiles, [tile * TP, block * BLOCK + h * 64], full.index(stage),
                    x.index(stage * 2 + h),
                )  # fmt: skip
            count += 1


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
              FORM: gl.constexpr, TP: gl.constexpr, PARTS: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """A warpgroup that multiplies 64 outputs of each tile by all rows of it.

    It starts the products of a block in its turn, and decodes in that of the other warpgroup.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TP, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # outputs of a warp stay in it: only its threads exchange numbers
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    rows = (T + TP - 1) // TP
    items = whole + (rows * BANDS - whole) * PARTS
    o = gl.arange(0, 64, gl.SliceLayout(1, A))
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, band, split, first, steps = _place(item, rows, whole, BLOCKS, PARTS)
        mine = band * 2 + WHICH
        held = load_factors(scale_ptr, zero_ptr, mine * 64 + o, first, G, SHARE)
        acc = gl.zeros([64, TP], gl.float32, ACC)
        for block in range(first, first + steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            words = w.index(stage * 2 + WHICH).load(A)
            scale, minus = _numbers(held, words.shape, ZERO, FORM)
            held = load_factors(scale_ptr, zero_ptr, mine * 64 + o, block + 1, G, SHARE)
            one = _decode_half(words, scale, minus, x, 0, A)
            two = _decode_half(words, scale, minus, x, 1, A)
            mbarrier.wait(turn.index(WHICH), (count & 1) ^ (1 - WHICH))
            acc = warpgroup_mma(one, x.index(stage * 2).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma(two, x.index(stage * 2 + 1).permute((1, 0)), acc, is_async=True)
            mbarrier.arrive(turn.index(1 - WHICH), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        if PARTS == 1:
            store_rows(y_ptr, bias_ptr, acc, mine, tile * TP, T, O, TP, ACC, LINES)
        elif split:
            place = ((band * rows + tile - whole) * 2 + WHICH).to(gl.int64) * (PARTS * 64 * TP)
            part = first // (BLOCKS // PARTS)
            _add_part(bias_ptr, y_ptr, part_ptr + place, ticket_ptr, acc, mine, tile, part, T, O,
                      TP, PARTS, ACC)  # fmt: skip
        else:
            store_rows(y_ptr, bias_ptr, acc, mine, tile * TP, T, O, TP, ACC, LINES)


@gluon.jit
def _add_part(bias_ptr, y_ptr, part_ptr, ticket_ptr, acc, mine, tile, part, T, O: gl.constexpr,
              TP: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr):  # fmt: skip
    """Keep the sums of a part; the warpgroup that keeps a tile's last stores the sum of all."""
    SUMS: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    SOME: gl.constexpr = 32  # rows at a time, whose parts fit the registers together
    o_acc = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    t_acc = gl.arange(0, TP, gl.SliceLayout(0, ACC))
    gl.store(part_ptr + part * (64 * TP) + t_acc[None, :] * 64 + o_acc[:, None], acc)
    gl.thread_barrier()  # all of the part is written before the counter is increased
    # a counter has four bits for each tile of rows
    before = gl.atomic_add(ticket_ptr + mine, 1 << (4 * tile), sem="acq_rel")
    if (before >> (4 * tile) & 15) == PARTS - 1:
        o = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
        some = gl.arange(0, SOME, gl.SliceLayout(0, SUMS))
        for at in range(0, TP, SOME):
            from_part = part_ptr + (at + some)[None, :] * 64 + o[:, None]
            parts = ()
            for p in gl.static_range(PARTS):
                parts = parts + (gl.load(from_part + p * (64 * TP), cache_modifier=".cg"),)
            total = parts[0]
            for p in gl.static_range(1, PARTS):
                total += parts[p]
            if bias_ptr is not None:
                total += gl.load(bias_ptr + mine * 64 + o).to(gl.float32)[:, None]
            row = tile * TP + at + some
            y_at = y_ptr + row.to(gl.int64)[None, :] * O + (mine * 64 + o)[:, None]
            gl.store(y_at, total.to(y_ptr.dtype.element_ty), (row < T)[None, :])
        gl.atomic_add(ticket_ptr + mine, -(PARTS << (4 * tile)), sem="relaxed")


@kernel("T", "whole", jit=gluon.jit)
def _grouped_gemm_tiles(
    scale_ptr,  # factors of groups: see TiledFactors
    zero_ptr,
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O] out
    part_ptr,  # [split tiles, 2, PARTS, TP, 64] float32, written and read if PARTS > 1
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
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    BANDS: gl.constexpr = O // (2 * 64)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    x = gl.allocate_shared_memory(dtype, [STAGES * 2, TP, 64], gl.NVMMASharedLayout(128, 16))
    w = gl.allocate_shared_memory(gl.int16, [STAGES * 2, 64, 32], gl.NVMMASharedLayout(64, 16))
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
                         PARTS, STAGES)),
            (_multiply, (scale_ptr, zero_ptr, bias_ptr, y_ptr, part_ptr, ticket_ptr, x, w, full,
                         empty, turn, T, whole, 1, O, BLOCKS, BANDS, G, ZERO, SHARE, FORM, TP,
                         PARTS, STAGES)),
            (_load, (x_tiles, w_tiles, x, w, full, empty, T, whole, BLOCKS, BANDS, TP, PARTS,
                     STAGES, PDL)),
        ],
        [4, 1],
        [232, 32],
    )  # fmt: skip


class GroupedTilesPlan(NamedTuple):
    """Split of a product.

    rows: of x of a tile; parts: of the inputs; tail: whole tiles come first, in full rounds of all
    programs, and only the others are split; stages.
    """

    rows: int
    parts: int
    tail: bool
    stages: int


_STAGES = {128: 5, 256: 3}
"""By rows of a tile: what fits a multiprocessor."""
_MICROSECONDS = {128: (0.72, 2.0, 3.0), 256: (1.2, 3.0, 6.0)}
"""By rows of a tile: of a block, of the end of a tile, and of one more part, as measured (H200)."""
_MAX_TILES_IN_PARTS = 8
"""Tiles of rows whose parts one counter counts."""

MAX_ROWS = 2048
"""Rows up to which widening the layer for the library was measured to be slower."""
_FEW_ROWS = 128
_MIN_WEIGHTS_FEW_ROWS = 1 << 25
"""Numbers of the smallest matrix for which this kernel is faster at up to _FEW_ROWS rows."""


def supports(x: Tensor, weight: TiledWeight) -> bool:
    """Whether this kernel multiplies these rows: 65 to 2,048, 4 bits, groups of 128, no table."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if not 64 < rows <= MAX_ROWS or x.dtype != weight.dtype:
        return False
    if gpu_target(x.device).capability != (9, 0):
        return False
    large = rows > _FEW_ROWS or outputs * inputs >= _MIN_WEIGHTS_FEW_ROWS
    return large and weight.blocks >= _STAGES[128] and decodes_in_registers(x, weight)


def plan_grouped_tiles(rows: int, weight: TiledWeight, sms: int) -> GroupedTilesPlan:
    """The split that takes the least time by _MICROSECONDS. It changes at multiples of 128 rows."""
    return min(
        (
            GroupedTilesPlan(tall, parts, tail, stages)
            for tall, stages in _STAGES.items()
            for parts in (1, 2, 3, 4)
            for tail in ((False, True) if parts > 1 else (False,))
            if not weight.blocks % parts
            and weight.blocks // parts >= stages
            and (parts == 1 or cdiv(rows, tall) <= _MAX_TILES_IN_PARTS)
        ),
        key=lambda plan: _microseconds(plan, rows, weight, sms),
    )


def _microseconds(plan: GroupedTilesPlan, rows: int, weight: TiledWeight, sms: int) -> float:
    block, end, part = _MICROSECONDS[plan.rows]
    tiles = cdiv(rows, plan.rows) * (weight.shape[0] // (2 * TILE))
    whole = _whole_tiles(plan, tiles, sms)
    found = cdiv(whole, sms) * (weight.blocks * block + end)
    if tiles > whole:
        each = weight.blocks // plan.parts * block + end + plan.parts * part
        found += cdiv((tiles - whole) * plan.parts, sms) * each
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
    rows, outputs = x.shape[0], weight.shape[0]
    sms = sm_count(x.device)
    plan = plan or plan_grouped_tiles(rows, weight, sms)
    tall, parts, _, stages = plan
    row_tiles = cdiv(rows, tall)
    assert parts == 1 or row_tiles <= _MAX_TILES_IN_PARTS, plan
    assert weight.blocks % parts == 0, plan
    assert weight.blocks // parts >= stages, plan
    tiles = row_tiles * (outputs // (2 * TILE))
    whole = _whole_tiles(plan, tiles, sms)
    sums = None
    if parts > 1:
        count = (tiles - whole) * parts * 2 * TILE * tall
        sums = torch.empty(count, dtype=torch.float32, device=y.device)
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
            form // 16, form // 4 % 4, tall, parts, stages, PDL_ENABLED,
        ),
        pdl=PDL_ENABLED,
        tiles=(describe_rows(x, tall), describe_codes(weight)),
        maxnreg=168,
    )  # fmt: skip
