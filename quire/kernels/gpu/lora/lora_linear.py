"""Adapters of a linear layer: shrink, v = x A^T, then expand, y += v B^T, over rows sorted by slot.

    shrink    program (tile of rows, part, ranks, slice of the inputs)
    expand    program (tile of rows, part, tile of the outputs); with the act_mul of a gated MLP,
              which reads them anyway, a program has both halves, and rows without an adapter too

A tile is rows of one slot, so only adapters that have rows are read, and a graph serves any mix:
slots, ranks and row counts are read from the device. The inputs are added up in slices whose number
depends on the layer alone. For few rows a program has one slice, and `expand` adds them up; for
many it has all, one after the other. Both give a row the same bits, whatever the rows beside it:
tiles are below 64 rows high, so all use the same instructions (mma, not wgmma).

The base product may run between them: it reads its weights while `shrink` runs, so that most of
`shrink` takes no time. `expand` reads B before the kernel before it has ended. v is in float32, and
multiplied in TF32, which holds B exactly.
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
RANKS = 64  # the most that `shrink` multiplies at a time; `expand` half as many
COLUMNS = 64  # outputs of a program: twice as many take three times the registers


@triton.jit
def _find_tile(start_ptr, tile, S: tl.constexpr, S_PAD: tl.constexpr, BM: tl.constexpr,
               BASE: tl.constexpr):  # fmt: skip
    """(slot or -2, first row, end of its rows) of a tile. BASE: rows of slot -1 have tiles too."""
    slot, row, last, before = -2, 0, 0, 0
    start = tl.load(start_ptr)
    if BASE:
        before = (start + BM - 1) // BM
        slot = tl.where(tile < before, -1, slot)
        row = tl.where(tile < before, tile * BM, row)
        last = tl.where(tile < before, start, last)
    if S <= 8:  # numbers of their own: threads need not wait for one another
        for s in tl.static_range(S):
            end = tl.load(start_ptr + s + 1)
            tiles = (end - start + BM - 1) // BM
            mine = (tile >= before) & (tile < before + tiles)
            slot = tl.where(mine, s, slot)
            row = tl.where(mine, start + (tile - before) * BM, row)
            last = tl.where(mine, end, last)
            before += tiles
            start = end
    else:
        s = tl.arange(0, S_PAD)
        starts = tl.load(start_ptr + s, s < S, 0)
        ends = tl.load(start_ptr + s + 1, s < S, 0)
        tiles = (ends - starts + BM - 1) // BM
        after = tl.cumsum(tiles, 0) + before
        mine = (after > tile) & (after - tiles <= tile)
        slot += tl.sum(tl.where(mine, s + 2, 0), 0)
        row += tl.sum(tl.where(mine, starts + (tile - after + tiles) * BM, 0), 0)
        last += tl.sum(tl.where(mine, ends, 0), 0)
    return slot, row, last


@triton.jit
def _find_columns(bound_ptr, tile, P: tl.constexpr, BN: tl.constexpr):
    """(part, first output, end of the part's outputs) of a tile of outputs."""
    part, first, last, before = 0, 0, 0, 0
    low = tl.load(bound_ptr)
    for p in tl.static_range(P):
        high = tl.load(bound_ptr + p + 1)
        mine = tile >= before  # the last of which this is true
        part = tl.where(mine, p, part)
        first = tl.where(mine, low + (tile - before) * BN, first)
        last = tl.where(mine, high, last)
        before += (high - low + BN - 1) // BN
        low = high
    return part, first, last


@triton.jit
def _load_b(b_ptr, slot, rank, o, known, R: tl.constexpr, O: tl.constexpr, BR: tl.constexpr):
    """The first ranks of B for outputs o: [BR, BN]."""
    r = tl.arange(0, BR)
    at = b_ptr + (slot.to(tl.int64) * R + r)[:, None] * O + o[None]
    return tl.load(at, (r < rank)[:, None] & known[None], 0.0)


@triton.jit
def _delta(b, b_ptr, v_ptr, slot, part, rank, n, live, o, known, rows, R: tl.constexpr,
           O: tl.constexpr, P: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr,
           BR: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """v B^T of rows n and outputs o: [BM, BN]. b: its first ranks."""
    EXACT: tl.constexpr = "tf32" if b_ptr.dtype.element_ty.primitive_bitwidth == 16 else "ieee"
    r = tl.arange(0, BR)
    b_at = b_ptr + (slot.to(tl.int64) * R + r)[:, None] * O + o[None]
    sums = tl.zeros((BM, BN), tl.float32)
    for above in range(0, rank, BR):
        v_at = v_ptr + (n.to(tl.int64) * P + part)[:, None] * R + (above + r)[None]
        v = tl.zeros((BM, BR), tl.float32)
        for _ in tl.static_range(PIECES):
            v += tl.load(v_at, live[:, None], 0.0)
            v_at += rows.to(tl.int64) * (P * R)
        if PDL:  # else each term of the sum would change its layout, through shared memory
            v = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=False, pack=1
            )
        sums = tl.dot(v, b.to(tl.float32), sums, input_precision=EXACT)
        b_at += BR * O
        b = tl.load(b_at, (above + BR + r < rank)[:, None] & known[None], 0.0)
    return sums


@triton.jit
def _adapted(y_at, inside, sums, factor_ptr, shift_ptr, slot, o, known, O: tl.constexpr):
    """y * factor + shift + sums, in float32."""
    y = tl.load(y_at, inside, 0.0).to(tl.float32)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + slot.to(tl.int64) * O + o, known, 0.0)[None]
    if shift_ptr is not None:
        y += tl.load(shift_ptr + slot.to(tl.int64) * O + o, known, 0.0)[None]
    return y + sums


@kernel("rows")
def _shrink(
    x_ptr,  # [T / TOP, I]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    a_ptr,  # [S, P, R, I]
    rank_ptr,  # [S, P]
    v_ptr,  # [slices, T, P, R] out, or [T, P, R] if LOOPED; sorted
    rows,
    X_T: tl.constexpr,
    I: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    TOP: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,  # of a slice
    LOOPED: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Before it waits it finds its rows, which the step's first kernels have written, and
    prefetches its part of A.

    EARLY: the next kernel waits for the end of this one before it reads or writes what kernels
    before this one write or read. `expand` reads y, so it may not begin before those have ended.
    """
    if PDL and EARLY:
        launch_dependents()
    OWN: tl.constexpr = 1 if LOOPED else SLICES
    BLOCKS: tl.constexpr = R // BR
    at = tl.program_id(0) % (OWN * P * BLOCKS)
    tile = tl.program_id(0) // (OWN * P * BLOCKS)
    slot, row, end = _find_tile(start_ptr, tile, S, S_PAD, BM, False)
    piece = at % OWN
    block = at // OWN % BLOCKS
    part = at // (OWN * BLOCKS)
    rank = 0
    if slot >= 0:
        rank = tl.load(rank_ptr + slot * P + part)
    first = piece * (STEPS * BK)
    a_ptr += ((slot * P + part).to(tl.int64) * R + block * BR) * I
    if PDL:
        SLICE: tl.constexpr = STEPS * BK * (a_ptr.dtype.element_ty.primitive_bitwidth // 8)
        if not LOOPED and I % (STEPS * BK) == 0 and SLICE % 16 == 0:
            if block * BR < rank:
                for line in tl.static_range(BR):
                    prefetch_l2(a_ptr + line * I + first, SLICE)
        wait_for_previous_kernel()
        if not EARLY:
            launch_dependents()
    if block * BR >= rank:
        return
    n = row + tl.arange(0, BM)
    live = n < end
    t = (tl.load(order_ptr + n, live, 0) // TOP).to(tl.int64)
    r = block * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    x_at = x_ptr + t[:, None] * X_T + k[None]
    a_at = a_ptr + tl.arange(0, BR)[None] * I + k[:, None]
    total = tl.zeros((BM, BR), tl.float32)
    sums = tl.zeros((BM, BR), tl.float32)
    for step in range(SLICES * STEPS if LOOPED else STEPS):
        start = first + step * BK
        known = start + k < I
        x = tl.load(x_at + start, live[:, None] & known[None], 0.0)
        a = tl.load(a_at + start, (r < rank)[None] & known[:, None], 0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
        if LOOPED:
            whole = step % STEPS == STEPS - 1
            total = tl.where(whole, total + sums, total)
            sums = tl.where(whole, 0.0, sums)
    if not LOOPED:
        total += sums
    v_at = v_ptr + ((piece * rows + n).to(tl.int64) * P + part)[:, None] * R + r[None]
    tl.store(v_at, total, live[:, None])


@kernel("rows")
def _expand(
    v_ptr,  # [PIECES, T, P, R], sorted
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    b_ptr,  # [S, R, O]
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
    PIECES: tl.constexpr,
    TILES: tl.constexpr,  # of the outputs: a tile is of one part
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    slot, row, end = _find_tile(start_ptr, tl.program_id(0) // TILES, S, S_PAD, BM, False)
    part, first, last = _find_columns(bound_ptr, tl.program_id(0) % TILES, P, BN)
    rank = 0
    if slot >= 0:
        rank = tl.load(rank_ptr + slot * P + part)
    n = row + tl.arange(0, BM)
    live = n < end
    t = tl.load(order_ptr + n, live, 0).to(tl.int64)
    o = first + tl.arange(0, BN)
    known = o < last
    b = _load_b(b_ptr, slot, rank, o, known, R, O, BR)
    if PDL:  # in every program
        wait_for_previous_kernel()
        launch_dependents()
    if rank == 0:
        return
    sums = _delta(b, b_ptr, v_ptr, slot, part, rank, n, live, o, known, rows, R, O, P, PIECES, BM,
                  BR, BN, PDL)  # fmt: skip
    y_at = y_ptr + t[:, None] * Y_T + o[None]
    inside = live[:, None] & known[None]
    y = _adapted(y_at, inside, sums, factor_ptr, shift_ptr, slot, o, known, O)
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), inside)


@kernel("rows")
def _expand_act(
    v_ptr,  # [PIECES, T, 2, R], sorted
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    b_ptr,  # [S, R, 2 * F]
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
    PIECES: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of rows without an adapter too: only their activation is computed."""
    TILES: tl.constexpr = (F + BN - 1) // BN
    O: tl.constexpr = 2 * F
    slot, row, end = _find_tile(start_ptr, tl.program_id(0) // TILES, S, S_PAD, BM, True)
    rank, up_rank = 0, 0
    if slot >= 0:
        rank = tl.load(rank_ptr + slot * 2)
        up_rank = tl.load(rank_ptr + slot * 2 + 1)
    n = row + tl.arange(0, BM)
    live = n < end
    t = tl.load(order_ptr + n, live, 0).to(tl.int64)
    o = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    known = o < F
    b = _load_b(b_ptr, slot, rank, o, known, R, O, BR)
    up_b = _load_b(b_ptr, slot, up_rank, F + o, known, R, O, BR)
    if PDL:  # in every program
        wait_for_previous_kernel()
        launch_dependents()
    if slot < -1:
        return
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    inside = live[:, None] & known[None]
    y_at = y_ptr + t[:, None] * Y_T + o[None]
    gate = tl.load(y_at, inside, 0.0)
    if rank > 0:
        sums = _delta(b, b_ptr, v_ptr, slot, 0, rank, n, live, o, known, rows, R, O, 2, PIECES,
                      BM, BR, BN, PDL)  # fmt: skip
        gate = _adapted(y_at, inside, sums, factor_ptr, shift_ptr, slot, o, known, O).to(dtype)
        tl.store(y_at, gate, inside)
    up = tl.load(y_at + F, inside, 0.0)
    if up_rank > 0:
        sums = _delta(up_b, b_ptr, v_ptr, slot, 1, up_rank, n, live, F + o, known, rows, R, O, 2,
                      PIECES, BM, BR, BN, PDL)  # fmt: skip
        up = _adapted(y_at + F, inside, sums, factor_ptr, shift_ptr, slot, F + o, known,
                      O).to(dtype)  # fmt: skip
        tl.store(y_at + F, up, inside)
    a = activate(gate.to(tl.float32), ACT) * up.to(tl.float32)
    tl.store(a_ptr + t[:, None] * F + o[None], a.to(dtype), inside)


class SlicePlan(NamedTuple):
    """Slices of the inputs, and the steps of each."""

    slices: int
    steps: int


def plan_slices(inputs: int) -> SlicePlan:
    """Slices of a layer. Nothing of a step may matter: a row's bits depend on it."""
    steps = cdiv(cdiv(inputs, min(MAX_SLICES, cdiv(inputs, MIN_SLICE))), STEP)
    return SlicePlan(cdiv(inputs, steps * STEP), steps)


def max_tiles(rows: int, slots: int, height: int) -> int:
    """The most tiles that so many rows can have."""
    return min(rows, rows // height + slots)


def outputs(y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows) -> Tensor:
    same = x.dtype == y.dtype == bank.a.dtype
    return y if same and x.stride(1) == 1 and y.stride(1) == 1 else NotImplemented


def fuses_act(bank: LoraBank) -> bool:
    """Whether act_mul may follow: the parts are its two halves."""
    return len(bank.parts) == 2 and bank.parts[0] == bank.parts[1]


class _Sizes(NamedTuple):
    """What both kernels derive from the rows of a step and a bank."""

    high: int  # rows of a tile
    tiles: int
    padded: int  # slots, to a power of two
    pieces: int  # of each sum


def _sizes(count: int, bank: LoraBank) -> _Sizes:
    slots, looped = len(bank.a), count > MAX_SPLIT_ROWS
    high = 32 if looped else 16
    pieces = 1 if looped else plan_slices(bank.a.shape[3]).slices
    return _Sizes(high, max_tiles(count, slots, high), next_power_of_2(slots), pieces)


def launch_shrink(
    y: Tensor, x: Tensor, bank: LoraBank, rows: LoraRows, *, early: bool = False
) -> Tensor:
    """Start the first half, which needs no base product. Returns: v, for launch().

    early: the next kernel is the base product, one that waits for this one.
    """
    check_rows(y, bank, rows)
    count = len(y)
    slots, parts, rank, inputs = bank.a.shape
    high, tiles, padded, pieces = _sizes(count, bank)
    looped, block = count > MAX_SPLIT_ROWS, min(rank & -rank, RANKS)
    v = torch.empty((pieces, count, parts, rank), dtype=torch.float32, device=y.device)
    _shrink(
        (tiles * pieces * parts * (rank // block), 1, 1),
        (x, rows.order, rows.starts, bank.a, bank.ranks, v),
        (count,),
        (
            x.stride(0), inputs, slots, padded, rows_per_input(y, x), parts, rank,
            *plan_slices(inputs), looped, high, block, STEP, early, PDL_ENABLED,
        ),
        warps=2 if block == 16 and not looped else 4,
        stages=4,
        pdl=PDL_ENABLED,
    )  # fmt: skip
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
    count = len(y)
    if not count:
        return
    if v is None:
        v = launch_shrink(y, x, bank, rows)
    slots, parts, rank, _ = bank.a.shape
    high, tiles, padded, pieces = _sizes(count, bank)
    block = min(rank & -rank, RANKS // 2)
    if act is not None:
        _expand_act(
            (max_tiles(count, slots + 1, high) * cdiv(bank.parts[0], COLUMNS), 1, 1),
            (v, rows.order, rows.starts, bank.b, bank.ranks, bank.factor, bank.shift, y, act.out),
            (count,),
            (
                y.stride(0), bank.parts[0], slots, padded, rank, pieces, act.kind, high, block,
                COLUMNS, PDL_ENABLED,
            ),
            warps=4,
            stages=1,
            pdl=PDL_ENABLED,
        )  # fmt: skip
        return
    columns = sum(cdiv(size, COLUMNS) for size in bank.parts)
    _expand(
        (tiles * columns, 1, 1),
        (v, rows.order, rows.starts, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift, y),
        (count,),
        (
            y.stride(0), y.shape[1], slots, padded, parts, rank, pieces,
            columns, high, block, COLUMNS, PDL_ENABLED,
        ),
        warps=4,
        stages=1,
        pdl=PDL_ENABLED,
    )  # fmt: skip
