"""Adapters of a linear layer: shrink, v = x A^T, then expand, y += v B^T.

    up to 64 rows    few_rows.py, row by row; of a plain weight with the product: adapted_linear.py
    more rows        over tiles of sorted rows, here:

    shrink    program (tile of rows, part, ranks, slice of the inputs)
    expand    program (tile of rows, part, tile of the outputs); with the act_mul of a gated MLP,
              which reads them anyway, a program has both halves, and rows without an adapter too

A tile is rows of one slot, so only adapters that have rows are read, and a graph serves any mix:
slots, ranks and row counts are read from the device.
The inputs are added up in slices whose number depends on the layer alone. For hundreds of rows a
program has one slice, and `expand` adds them up; for more it has all, one after the other. Both
give a row the same bits, whatever the rows beside it: tiles are below 64 rows high, so all use the
same instructions (mma, not wgmma).

`expand` reads B before the kernel before it has ended. v is in float32, and multiplied in TF32,
which holds B exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.lora import few_rows
from quire.kernels.gpu.lora.few_rows import alignment, find_columns
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)
from quire.kernels.lora import check_rows, rows_per_input

MAX_SPLIT_ROWS = 512
"""Rows up to which the slices of a sum are programs of their own."""

MAX_SLICES = 16
MIN_SLICE = 256  # inputs
STEP = 128  # inputs that are loaded at a time
TILE_ROWS = 16
MANY_TILE_ROWS = 32
RANKS = 32  # the most that `expand` multiplies at a time
COLUMNS = 64  # outputs of a program: twice as many take three times the registers
MAX_REGISTERS = 72
"""Of a thread that expands: seven programs then share a multiprocessor."""


class SlicePlan(NamedTuple):
    """Slices of the inputs, and the steps of each."""

    slices: int
    steps: int


def plan_slices(inputs: int) -> SlicePlan:
    """Slices of a layer. Nothing of a step may matter: a row's bits depend on it."""
    steps = cdiv(cdiv(inputs, min(MAX_SLICES, cdiv(inputs, MIN_SLICE))), STEP)
    return SlicePlan(cdiv(inputs, steps * STEP), steps)


def _max_tiles(rows: int, slots: int, height: int) -> int:
    """The most tiles that so many rows can have."""
    return min(rows, rows // height + slots)


@triton.jit
def _tile_ends(start_ptr, S: tl.constexpr, S_PAD: tl.constexpr, BM: tl.constexpr,
              BASE: tl.constexpr):  # fmt: skip
    """(first rows, ends of rows, ends of tiles) of all slots: [S_PAD] each, and base tiles.

    BASE: rows of slot -1 have tiles too, before the others.
    """
    s = tl.arange(0, S_PAD)
    starts = tl.load(start_ptr + s, s < S, 0)
    ends = tl.load(start_ptr + s + 1, s < S, 0)
    base = 0
    if BASE:
        base = (tl.load(start_ptr) + BM - 1) // BM
    return starts, ends, tl.cumsum((ends - starts + BM - 1) // BM, 0) + base, base


@triton.jit
def _tile_at(tile, starts, ends, after, base, S_PAD: tl.constexpr, BM: tl.constexpr,
            BASE: tl.constexpr):  # fmt: skip
    """(slot, first row, end of its rows) of a tile of _tile_ends()."""
    s = tl.arange(0, S_PAD)
    before = after - (ends - starts + BM - 1) // BM
    mine = (after > tile) & (before <= tile)
    slot = tl.sum(tl.where(mine, s + 1, 0), 0) - 1
    row = tl.sum(tl.where(mine, starts + (tile - before) * BM, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    if BASE:
        row = tl.where(tile < base, tile * BM, row)
        end = tl.where(tile < base, tl.min(tl.where(s == 0, starts, 2147483647), 0), end)
    return slot, row, end


@kernel("rows")
def _shrink(
    x_ptr,  # [T / TOP, I]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    a_ptr,  # [S, P, ROOM, I]
    rank_ptr,  # [S, P]
    v_ptr,  # [SLICES, T, P, R] out
    rows,
    X_T: tl.constexpr,
    I: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    TOP: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = R // BR
    at = tl.program_id(0)
    piece = at % SLICES
    part = at // SLICES % P
    block = at // (SLICES * P) % BLOCKS
    tile = at // (SLICES * P * BLOCKS)
    starts, ends, after, base = _tile_ends(start_ptr, S, S_PAD, BM, False)
    tiles = tl.max(after, 0)
    slot, row, end = _tile_at(tile, starts, ends, after, base, S_PAD, BM, False)
    first = piece * (STEPS * BK)
    if PDL:
        SLICE: tl.constexpr = STEPS * BK * (a_ptr.dtype.element_ty.primitive_bitwidth // 8)
        if I % (STEPS * BK) == 0 and SLICE % 16 == 0:
            if tile < tiles:
                ahead = a_ptr + ((slot * P + part).to(tl.int64) * ROOM + block * BR) * I + first
                for line in tl.static_range(BR):
                    prefetch_l2(ahead + line * I, SLICE)
        wait_for_previous_kernel()
        launch_dependents()
    k = tl.arange(0, BK)
    r = block * BR + tl.arange(0, BR)
    if tile < tiles:
        rank = tl.load(rank_ptr + slot * P + part)
        if block * BR < rank:
            n = row + tl.arange(0, BM)
            live = n < end
            pair = tl.load(order_ptr + n, live, 0).to(tl.int64)
            x_at = x_ptr + (pair // TOP)[:, None] * X_T + k[None]
            a_at = a_ptr + ((slot * P + part).to(tl.int64) * ROOM + r)[None] * I + k[:, None]
            sums = tl.zeros((BM, BR), tl.float32)
            for step in tl.range(0, STEPS, num_stages=4):
                start = first + step * BK
                known = start + k < I
                x = tl.load(x_at + start, live[:, None] & known[None], 0.0)
                a = tl.load(a_at + start, (r < rank)[None] & known[:, None], 0.0)
                sums = tl.dot(x, a, sums, input_precision="ieee")
            v_at = v_ptr + ((piece * rows + pair) * P + part)[:, None] * R + r[None]
            tl.store(v_at, sums, live[:, None])


@kernel("rows")
def _shrink_many(
    x_ptr,  # [T / TOP, I]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    a_ptr,  # [S, P, ROOM, I]
    rank_ptr,  # [S, P]
    v_ptr,  # [T, P, R] out
    rows,
    X_T: tl.constexpr,
    I: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    TOP: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,  # of a slice
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has all slices of a tile, one after the other."""
    BLOCKS: tl.constexpr = R // BR
    at = tl.program_id(0) % (P * BLOCKS)
    starts, ends, after, base = _tile_ends(start_ptr, S, S_PAD, BM, False)
    slot, row, end = _tile_at(tl.program_id(0) // (P * BLOCKS), starts, ends, after, base, S_PAD,
                              BM, False)  # fmt: skip
    block = at % BLOCKS
    part = at // BLOCKS
    rank = 0
    if slot >= 0:
        rank = tl.load(rank_ptr + slot * P + part)
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    if block * BR >= rank:
        return
    n = row + tl.arange(0, BM)
    live = n < end
    pair = tl.load(order_ptr + n, live, 0).to(tl.int64)
    r = block * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    x_at = x_ptr + (pair // TOP)[:, None] * X_T + k[None]
    a_at = a_ptr + ((slot * P + part).to(tl.int64) * ROOM + r)[None] * I + k[:, None]
    total = tl.zeros((BM, BR), tl.float32)
    sums = tl.zeros((BM, BR), tl.float32)
    for step in range(SLICES * STEPS):
        start = step * BK
        known = start + k < I
        x = tl.load(x_at + start, live[:, None] & known[None], 0.0)
        a = tl.load(a_at + start, (r < rank)[None] & known[:, None], 0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
        whole = step % STEPS == STEPS - 1
        total = tl.where(whole, total + sums, total)
        sums = tl.where(whole, 0.0, sums)
    tl.store(v_ptr + (pair * P + part)[:, None] * R + r[None], total, live[:, None])


@triton.jit
def _sum_v(v_ptr, t, live, part, above, rows, P: tl.constexpr, R: tl.constexpr,
          SLICES: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Ranks [above, above + BR) of v of rows t: [len(t), BR]."""
    r = above + tl.arange(0, BR)
    at = v_ptr + (t * P + part)[:, None] * R + r[None]
    v = tl.load(at, live[:, None], 0.0) + 0.0
    for _ in tl.static_range(SLICES - 1):
        at += rows.to(tl.int64) * (P * R)
        v += tl.load(at, live[:, None], 0.0)
    if PDL:  # else each term of the sum would change its layout, through shared memory
        v = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=False, pack=1
        )
    return v


@triton.jit
def _read_tile(tile, starts, ends, after, base, order_ptr, rank_ptr, part, S_PAD: tl.constexpr,
               P: tl.constexpr, BM: tl.constexpr, BASE: tl.constexpr):  # fmt: skip
    """(slot, rank of a part, rows of the step, which of them there are) of a tile."""
    slot, row, end = _tile_at(tile, starts, ends, after, base, S_PAD, BM, BASE)
    n = row + tl.arange(0, BM)
    live = n < end
    t = tl.load(order_ptr + n, live, 0).to(tl.int64)
    rank = tl.load(rank_ptr + slot * P + part, slot >= 0, 0)
    return slot, rank, t, live


@triton.jit
def _load_b(b_ptr, slot, rank, above, o, known, ROOM: tl.constexpr, O: tl.constexpr,
            BR: tl.constexpr):  # fmt: skip
    """Ranks [above, above + BR) of B for outputs o: [BR, BN]."""
    r = above + tl.arange(0, BR)
    at = b_ptr + (slot.to(tl.int64) * ROOM + r)[:, None] * O + o[None]
    return tl.load(at, (r < rank)[:, None] & known[None], 0.0)


@triton.jit
def _add_delta(y_at, inside, b, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, part, rank, t, live, o,
               known, rows, R: tl.constexpr, ROOM: tl.constexpr, O: tl.constexpr, P: tl.constexpr,
               SLICES: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """y * factor + shift + v B^T, rounded. b: the first ranks of B."""
    EXACT: tl.constexpr = "tf32" if b_ptr.dtype.element_ty.primitive_bitwidth == 16 else "ieee"
    sums = tl.zeros((BM, BN), tl.float32)
    for above in range(0, rank, BR):
        v = _sum_v(v_ptr, t, live, part, above, rows, P, R, SLICES, BR, PDL)
        sums = tl.dot(v, b.to(tl.float32), sums, input_precision=EXACT)
        b = _load_b(b_ptr, slot, rank, above + BR, o, known, ROOM, O, BR)
    z = tl.load(y_at, inside, 0.0).to(tl.float32)
    if factor_ptr is not None:
        z *= tl.load(factor_ptr + slot.to(tl.int64) * O + o, known, 0.0)[None]
    if shift_ptr is not None:
        z += tl.load(shift_ptr + slot.to(tl.int64) * O + o, known, 0.0)[None]
    return (z + sums).to(y_at.dtype.element_ty)


@kernel("rows")
def _expand(
    v_ptr,  # [SLICES, T, P, R]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    b_ptr,  # [S, ROOM, O]
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # [S, O] or None
    shift_ptr,  # [S, O] or None
    y_ptr,  # [T, O], in place
    rows,
    Y_T: tl.constexpr,
    O: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    SLICES: tl.constexpr,
    TILES: tl.constexpr,  # of the outputs: a tile is of one part
    ALIGN: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) // TILES
    part, first, last = find_columns(bound_ptr, tl.program_id(0) % TILES, P, BN, ALIGN)
    o = first + tl.arange(0, BN)
    known = o < last
    starts, ends, after, base = _tile_ends(start_ptr, S, S_PAD, BM, False)
    tiles = tl.max(after, 0)
    slot, rank, t, live = _read_tile(at, starts, ends, after, base, order_ptr, rank_ptr, part,
                                     S_PAD, P, BM, False)  # fmt: skip
    b = _load_b(b_ptr, slot, rank, 0, o, known, ROOM, O, BR)
    if PDL:  # in every program
        wait_for_previous_kernel()
        launch_dependents()
    if at < tiles:
        if rank > 0:
            inside = live[:, None] & known[None]
            y_at = y_ptr + t[:, None] * Y_T + o[None]
            y = _add_delta(y_at, inside, b, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, part, rank,
                           t, live, o, known, rows, R, ROOM, O, P, SLICES, BM, BR, BN,
                           PDL)  # fmt: skip
            tl.store(y_at, y, inside)


@kernel("rows")
def _expand_act(
    v_ptr,  # [SLICES, T, 2, R]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    b_ptr,  # [S, ROOM, 2 * F]
    rank_ptr,  # [S, 2]
    factor_ptr,  # [S, 2 * F] or None
    shift_ptr,  # [S, 2 * F] or None
    y_ptr,  # [T, 2 * F], in place
    a_ptr,  # [T, F] out
    rows,
    Y_T: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    SLICES: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of rows without an adapter too: only their activation is computed."""
    TILES: tl.constexpr = (F + BN - 1) // BN
    O: tl.constexpr = 2 * F
    at = tl.program_id(0) // TILES
    o = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    known = o < F
    starts, ends, after, base = _tile_ends(start_ptr, S, S_PAD, BM, True)
    tiles = tl.max(after, 0)
    slot, rank, t, live = _read_tile(at, starts, ends, after, base, order_ptr, rank_ptr, 0,
                                     S_PAD, 2, BM, True)  # fmt: skip
    up_rank = tl.load(rank_ptr + slot * 2 + 1, slot >= 0, 0)
    b = _load_b(b_ptr, slot, rank, 0, o, known, ROOM, O, BR)
    up_b = _load_b(b_ptr, slot, up_rank, 0, F + o, known, ROOM, O, BR)
    if PDL:  # in every program
        wait_for_previous_kernel()
        launch_dependents()
    if at < tiles:
        inside = live[:, None] & known[None]
        y_at = y_ptr + t[:, None] * Y_T + o[None]
        gate = tl.load(y_at, inside, 0.0)
        up = tl.load(y_at + F, inside, 0.0)
        if rank > 0:
            gate = _add_delta(y_at, inside, b, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, 0, rank,
                              t, live, o, known, rows, R, ROOM, O, 2, SLICES, BM, BR, BN,
                              PDL)  # fmt: skip
            tl.store(y_at, gate, inside)
        if up_rank > 0:
            up = _add_delta(y_at + F, inside, up_b, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, 1,
                            up_rank, t, live, F + o, known, rows, R, ROOM, O, 2, SLICES, BM, BR, BN,
                            PDL)  # fmt: skip
            tl.store(y_at + F, up, inside)
        a = activate(gate.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(a_ptr + t[:, None] * F + o[None], a.to(gate.dtype), inside)


def outputs(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    same = x.dtype == y.dtype == bank.a.dtype
    return y if same and x.stride(1) == 1 and y.stride(1) == 1 else NotImplemented


def fuses_act(bank: LoraBank) -> bool:
    """Whether act_mul may follow: the parts are its two halves."""
    return len(bank.parts) == 2 and bank.parts[0] == bank.parts[1]


def _padded(slots: int) -> int:
    return max(2, next_power_of_2(slots))


def launch_shrink(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    """Start the first half, which needs no base product. Returns: v, for launch()."""
    count, (slots, parts, rank, inputs) = len(y), bank.a.shape
    if count <= few_rows.most_rows(bank):
        return few_rows.launch_shrink(y, x, bank, rows)
    check_rows(y, bank, rows)
    block = min(rank & -rank, 64)
    slices, steps = plan_slices(inputs)
    tensors = x, rows.order, rows.starts, bank.a, bank.ranks
    sizes = x.stride(0), inputs, slots, _padded(slots), rows_per_input(y, x), parts, rank, bank.room
    split = count <= MAX_SPLIT_ROWS
    high = TILE_ROWS if split else MANY_TILE_ROWS
    tiles = _max_tiles(count, slots, high)
    v = torch.empty((slices if split else 1, count, parts, rank), device=y.device)
    if split:
        _shrink(
            (slices * parts * (rank // block) * tiles, 1, 1),
            (*tensors, v),
            (count,),
            (*sizes, slices, steps, high, block, STEP, PDL_ENABLED),
            warps=2 if block == 16 else 4,
            pdl=PDL_ENABLED,
        )
        return v
    _shrink_many(
        (tiles * parts * (rank // block), 1, 1),
        (*tensors, v),
        (count,),
        (*sizes, slices, steps, high, block, STEP, PDL_ENABLED),
        warps=4,
        stages=4,
        pdl=PDL_ENABLED,
    )
    return v


def launch(
    out: Tensor,
    y: Tensor,
    x: Tensor,
    bank: LoraBank,
    rows: LoraRows,
    act: FusedActivation | None = None,
    v: Tensor | None = None,
) -> None:
    """Fills the result of act too, which is an act_mul of y. v: of launch_shrink, if that ran."""
    count, (slots, parts, rank, _) = len(y), bank.a.shape
    if not count:
        return
    if v is None:
        v = launch_shrink(y, x, bank, rows)
    if count <= few_rows.most_rows(bank):
        few_rows.launch_expand(y, v, bank, rows, act)
        return
    high = TILE_ROWS if count <= MAX_SPLIT_ROWS else MANY_TILE_ROWS
    tiles = _max_tiles(count, slots + (act is not None), high)
    block = min(rank & -rank, RANKS)
    if act is not None:
        _expand_act(
            (tiles * cdiv(bank.parts[0], COLUMNS), 1, 1),
            (v, rows.order, rows.starts, bank.b, bank.ranks, bank.factor, bank.shift, y, act.out),
            (count,),
            (
                y.stride(0), bank.parts[0], slots, _padded(slots), rank, bank.room, len(v),
                act.kind, high, block, COLUMNS, PDL_ENABLED,
            ),
            warps=4,
            stages=1,
            pdl=PDL_ENABLED,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        return
    columns = sum(cdiv(size, COLUMNS) for size in bank.parts)
    _expand(
        (tiles * columns, 1, 1),
        (v, rows.order, rows.starts, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift, y),
        (count,),
        (
            y.stride(0), y.shape[1], slots, _padded(slots), parts, rank, bank.room, len(v),
            columns, alignment(bank.parts), high, block, COLUMNS, PDL_ENABLED,
        ),
        warps=4,
        stages=1,
        pdl=PDL_ENABLED,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
