"""Handover of v = x A^T inside one launch: its first programs compute v, the others wait for it.

    program 0 .. N - 1     shrink: store their part of v, then count themselves (release)
    all others             read W and B, compute what needs no v; poll the count; add v B^T

No program waits for a later one: programs begin in the order of their numbers, those that shrink
wait for nothing but the kernel before this one, and that one runs without this one's end. So the
shrinking programs have a place when others begin to poll, and end; a small kernel beside cannot
change that, as it ends too.

The counts of a bank only grow, by _ONE in each launch, however many programs it has: nothing must
be reset, and a graph may be replayed. A launch has its number from the count of those who waited:
until a program has counted itself, that count has not reached the next multiple. Launches of one
bank follow each other on one stream.

Polls and loads of v are volatile: they read L2, in order, and leave the caches of W and x alone, as
an acquiring load would not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import PROGRESS_WORDS
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import launch_dependents, prefetch_l2, wait_for_previous_kernel

MAX_SLICES = 16
MIN_SLICE = 256  # inputs
STEP = 128  # inputs that are loaded at a time
TILE_ROWS = 16

_ONE = tl.constexpr(1 << 20)
_WAITED = tl.constexpr(PROGRESS_WORDS // 2)


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


@triton.jit
def _count(word_ptr, first, COUNTED: tl.constexpr):
    """Count this program: 1 each, and what is missing to 2**20 by the first."""
    share = tl.where(first, _ONE - COUNTED + 1, 1).to(tl.int64)
    tl.atomic_add(word_ptr, share, sem="release", scope="gpu")


@triton.jit
def hand_over(progress_ptr, SHRINKS: tl.constexpr):
    """Count a program whose part of v is stored."""
    tl.debug_barrier()  # the stores of all threads come before
    _count(progress_ptr, tl.program_id(0) == 0, SHRINKS)


@triton.jit
def read_progress(progress_ptr):
    """(count of v that this launch waits for, count so far). After the kernel before has ended."""
    waited = tl.load(progress_ptr + _WAITED, volatile=True)
    return (waited // _ONE + 1) * _ONE, tl.load(progress_ptr, volatile=True)


@triton.jit
def wait_for_v(progress_ptr, wanted, found, SHRINKS: tl.constexpr):
    """Poll until v is complete, then count this program among those who waited."""
    while found < wanted:
        found = tl.load(progress_ptr, volatile=True)
    tl.debug_barrier()  # every thread has read its launch's number
    waiting = tl.num_programs(0) - SHRINKS
    share = tl.where(tl.program_id(0) == SHRINKS, _ONE - waiting + 1, 1).to(tl.int64)
    tl.atomic_add(progress_ptr + _WAITED, share, sem="relaxed", scope="gpu")


@triton.jit
def tile_ends(start_ptr, S: tl.constexpr, S_PAD: tl.constexpr, BM: tl.constexpr,
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
def tile_at(tile, starts, ends, after, base, S_PAD: tl.constexpr, BM: tl.constexpr,
            BASE: tl.constexpr):  # fmt: skip
    """(slot, first row, end of its rows) of a tile of tile_ends()."""
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


@triton.jit
def shrink_tiles(x_ptr, order_ptr, start_ptr, a_ptr, rank_ptr, v_ptr, progress_ptr, rows, X_T:
                 tl.constexpr, I: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr,
                 TOP: tl.constexpr, P: tl.constexpr, R: tl.constexpr, SLICES: tl.constexpr,
                 STEPS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
                 BK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One of the first SLICES * P * (R / BR) * TILES programs: a slice of a tile of rows.

    v: [SLICES, T, P, R], of the step's rows in their order. progress_ptr: None: nothing waits for v
    in this launch. EARLY: the next kernel waits for the end of this one before it reads or writes
    what kernels before this one write or read.
    """
    if PDL and EARLY:
        launch_dependents()
    BLOCKS: tl.constexpr = R // BR
    at = tl.program_id(0)
    piece = at % SLICES
    part = at // SLICES % P
    block = at // (SLICES * P) % BLOCKS
    tile = at // (SLICES * P * BLOCKS)
    starts, ends, after, base = tile_ends(start_ptr, S, S_PAD, BM, False)
    tiles = tl.max(after, 0)
    slot, row, end = tile_at(tile, starts, ends, after, base, S_PAD, BM, False)
    first = piece * (STEPS * BK)
    if PDL:
        SLICE: tl.constexpr = STEPS * BK * (a_ptr.dtype.element_ty.primitive_bitwidth // 8)
        if I % (STEPS * BK) == 0 and SLICE % 16 == 0:
            if tile < tiles:
                ahead = a_ptr + ((slot * P + part).to(tl.int64) * R + block * BR) * I + first
                for line in tl.static_range(BR):
                    prefetch_l2(ahead + line * I, SLICE)
        wait_for_previous_kernel()
        if not EARLY:
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
            a_at = a_ptr + ((slot * P + part).to(tl.int64) * R + r)[None] * I + k[:, None]
            sums = tl.zeros((BM, BR), tl.float32)
            for step in tl.range(0, STEPS, num_stages=4):
                start = first + step * BK
                known = start + k < I
                x = tl.load(x_at + start, live[:, None] & known[None], 0.0)
                a = tl.load(a_at + start, (r < rank)[None] & known[:, None], 0.0)
                sums = tl.dot(x, a, sums, input_precision="ieee")
            v_at = v_ptr + ((piece * rows + pair) * P + part)[:, None] * R + r[None]
            tl.store(v_at, sums, live[:, None])
    if progress_ptr is not None:
        hand_over(progress_ptr, SLICES * P * BLOCKS * TILES)


@triton.jit
def sum_v(v_ptr, t, live, part, above, rows, P: tl.constexpr, R: tl.constexpr,
          SLICES: tl.constexpr, BR: tl.constexpr, SHARED: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    """Ranks [above, above + BR) of v of rows t: [len(t), BR]. SHARED: v is of this launch."""
    r = above + tl.arange(0, BR)
    at = v_ptr + (t * P + part)[:, None] * R + r[None]
    v = tl.load(at, live[:, None], 0.0, volatile=SHARED) + 0.0
    for _ in tl.static_range(SLICES - 1):
        at += rows.to(tl.int64) * (P * R)
        v += tl.load(at, live[:, None], 0.0, volatile=SHARED)
    if PDL:  # else each term of the sum would change its layout, through shared memory
        v = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=False, pack=1
        )
    return v


class ShrinkPlan(NamedTuple):
    """How the first programs of a launch share the shrinking."""

    slices: int
    steps: int
    tiles: int  # of rows, the most that there can be
    block: int  # ranks
    programs: int


def plan_shrink(rows: int, slots: int, parts: int, rank: int, inputs: int) -> ShrinkPlan:
    tiles = max_tiles(rows, slots, TILE_ROWS)
    block = min(rank & -rank, 64)
    slices, steps = plan_slices(inputs)
    return ShrinkPlan(slices, steps, tiles, block, slices * parts * (rank // block) * tiles)


def empty_v(plan: ShrinkPlan, y: Tensor, parts: int, rank: int) -> Tensor:
    """Room for what shrink_tiles() computes for the rows of y."""
    return torch.empty((plan.slices, len(y), parts, rank), dtype=torch.float32, device=y.device)
