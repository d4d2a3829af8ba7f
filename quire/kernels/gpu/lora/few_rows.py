"""Adapters of up to 64 rows, each row with its own A and B: shrink, and what adds v B^T.

    v[t, p, r] = A[slot of t, p, r] x[t]         _shrink_rows: a program has one rank of a few rows
    y[t, n]   += sum_r v[t, p, r] B[slot, r, n]  row_deltas: a program has some outputs of some rows

Rows need no order: the slot of a row leads to its ranks, those to A or B, all rows at once. Where
rows share a slot, they share the lines in the cache. Both are sums of float32 in one order, so a
row has the same bits whatever the rows beside it.

Between the two runs the base product, or the second is part of it (adapted_linear.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats import lora_bank
from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    FusedActivation,
    FusedNorm,
    load_normed_vector,
    load_vector,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)
from quire.kernels.lora import check_rows, rows_per_input

MAX_ROWS = 64
MAX_RANK = 32
"""With larger ranks tiles (lora_linear.py) are faster from half as many rows on, by most mixes."""

RANK_STEP = tl.constexpr(lora_bank.RANK_STEP)
SHRINK_ROWS = 4  # the most of a program
NUMBERS = 128  # of A in a thread's registers: half as many registers
PREFETCH = 8
"""MiB of W that are on their way to L2 while shrink waits for x, and the product for shrink."""
MAX_AHEAD = 1 << 15  # numbers that one instruction prefetches
EXPAND_ROWS = 4
RANKS = 16  # of B that a program has on the way at a time; no more than RANK_STEP
COLUMNS = 128  # outputs of a program, of each half if there are halves
EXPAND_WARPS = 4


def most_rows(bank: LoraBank) -> int:
    """Return the rows of the largest step whose adapters these kernels compute."""
    return MAX_ROWS if bank.a.shape[2] <= MAX_RANK else MAX_ROWS // 2


@triton.jit
def read_slots(slot_ptr, rank_ptr, t, rows, part, P: tl.constexpr):
    """(slot, rank of a part, whether there is an adapter) of rows t; without one the rank is 0.

    No load waits for the part, and what needs the slot alone does not wait for the rank.
    """
    found = tl.load(slot_ptr + t, t < rows, -1)
    slot = tl.maximum(found, 0)
    rank = slot * 0
    for p in tl.static_range(P):
        rank = tl.where(part == p, tl.load(rank_ptr + slot * P + p, found >= 0, 0), rank)
    return slot.to(tl.int64), rank, found >= 0


@triton.jit
def load_row_bs(b_ptr, slot, live, above, n, known, ROOM: tl.constexpr, O: tl.constexpr,
                BR: tl.constexpr):  # fmt: skip
    """Ranks [above, above + BR) of B for live rows and outputs n: BR times [TB, BN].

    What is beyond a row's rank is undefined: to know it would take one access more.
    """
    bs = ()
    at = b_ptr + (slot * ROOM + above)[:, None] * O + n[None]
    for r in tl.static_range(BR):
        bs = bs + (tl.load(at + r * O, live[:, None] & known[None], 0.0),)  # type: ignore[assignment]
    return bs


@triton.jit
def row_deltas(z, bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, rank, part, t, n, known,
               P: tl.constexpr, R: tl.constexpr, ROOM: tl.constexpr, O: tl.constexpr,
               BR: tl.constexpr):  # fmt: skip
    """z [TB, BN] with the adapters of its rows, rounded. bs: the first ranks of B."""
    sums = tl.zeros(z.shape, tl.float32)
    v_at = v_ptr + (t.to(tl.int64) * P + part) * R
    for above in range(0, tl.max(rank, 0), BR):
        vs = ()
        for r in tl.static_range(BR):
            vs = vs + (tl.load(v_at + above + r, above + r < rank, 0.0),)  # type: ignore[assignment]
        for r in tl.static_range(BR):
            b = tl.where((above + r < rank)[:, None], bs[r].to(tl.float32), 0.0)
            sums += vs[r][:, None] * b
        bs = load_row_bs(b_ptr, slot, above + BR < rank, above + BR, n, known, ROOM, O, BR)
    y = z.to(tl.float32)
    adapted = (rank > 0)[:, None]
    inside = adapted & known[None]
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + slot[:, None] * O + n[None], inside, 0.0)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + slot[:, None] * O + n[None], inside, 0.0)
    return tl.where(adapted, (y + sums).to(z.dtype), z)


@kernel("rows", "eps", "offset")
def _shrink_rows(
    x_ptr,  # [T / TOP, I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    slot_ptr,  # [T]
    a_ptr,  # [S, P, ROOM, I]
    rank_ptr,  # [S, P]
    w_ptr,  # the weight of the base product, read only if TIMES
    v_ptr,  # [T, P, R] out
    rows,
    eps,
    offset,
    X_T: tl.constexpr,
    I: tl.constexpr,
    TOP: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    NORM: tl.constexpr,  # of one row
    ADD: tl.constexpr,
    TB: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,  # numbers of W that a program prefetches at a time
    TIMES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and EARLY:
        launch_dependents()
    C: tl.constexpr = (I + BK - 1) // BK
    r = tl.program_id(0) % R
    part = tl.program_id(0) // R % P
    t = tl.program_id(0) // (R * P) * TB + tl.arange(0, TB)
    k = tl.arange(0, BK)
    slot, rank, live = read_slots(slot_ptr, rank_ptr, t, rows, part, P)
    if r >= RANK_STEP:  # few adapters may have so many; the first are read before that is known
        live = r < rank
    a_at = a_ptr + ((slot * P + part) * ROOM + r)[:, None] * I + k[None]
    tiles = ()
    for c in tl.static_range(C):
        tiles = tiles + (tl.load(a_at + c * BK, live[:, None] & (c * BK + k < I)[None], 0.0),)  # type: ignore[assignment]
    if NORM:
        norm = load_vector(norm_ptr, k, I, BK, C)
    if PDL:
        SIZE: tl.constexpr = AHEAD * (a_ptr.dtype.element_ty.primitive_bitwidth // 8)
        if TIMES and tl.program_id(0) < P * R:
            for g in tl.static_range(TIMES):
                prefetch_l2(w_ptr + (tl.program_id(0).to(tl.int64) * TIMES + g) * AHEAD, SIZE)
        wait_for_previous_kernel()
        if not EARLY:
            launch_dependents()
    if tl.max(rank, 0) > r:
        live = r < rank
        sums = tl.zeros((TB, BK), tl.float32)
        if NORM:
            xs = load_normed_vector(x_ptr, res_ptr, norm, None, None, k, eps, offset, I, BK, C, ADD)
            for c in tl.static_range(C):
                sums += tiles[c].to(tl.float32) * xs[c].to(tl.float32)[None]
        else:
            x_at = x_ptr + (t // TOP).to(tl.int64)[:, None] * X_T + k[None]
            for c in tl.static_range(C):
                x = tl.load(x_at + c * BK, live[:, None] & (c * BK + k < I)[None], 0.0)
                sums += tiles[c].to(tl.float32) * x.to(tl.float32)
        tl.store(v_ptr + (t * P + part) * R + r, tl.sum(sums, 1), live)


@triton.jit
def find_columns(bound_ptr, tile, P: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr):
    """(part, first output, end of the part's outputs) of a tile of outputs. ALIGN: of parts."""
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
    return part, tl.multiple_of(first, ALIGN), tl.multiple_of(last, ALIGN)


@kernel("rows")
def _expand_rows(
    v_ptr,  # [T, P, R]
    slot_ptr,  # [T]
    b_ptr,  # [S, ROOM, O]
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # [S, O] or None
    shift_ptr,  # [S, O] or None
    y_ptr,  # [T, O], in place
    act_ptr,  # [T, O / 2] out if ACT
    rows,
    Y_T: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind; the parts are the two halves then
    TILES: tl.constexpr,  # of the outputs: a tile is of one part, or of the same outputs of both
    ALIGN: tl.constexpr,
    TB: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) // TILES * TB + tl.arange(0, TB)
    tile = tl.program_id(0) % TILES
    HALF: tl.constexpr = O // 2
    part, first, last = 0, tile * BN, HALF
    if ACT is None:
        part, first, last = find_columns(bound_ptr, tile, P, BN, ALIGN)
    n = first + tl.arange(0, BN)
    known = n < last
    slot, rank, live = read_slots(slot_ptr, rank_ptr, t, rows, part, P)
    bs = load_row_bs(b_ptr, slot, live, 0, n, known, ROOM, O, BR)
    if ACT is not None:
        _, up_rank, _ = read_slots(slot_ptr, rank_ptr, t, rows, 1, P)
        up_bs = load_row_bs(b_ptr, slot, live, 0, HALF + n, known, ROOM, O, BR)
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    y_at = y_ptr + t.to(tl.int64)[:, None] * Y_T + n[None]
    inside = (t < rows)[:, None] & known[None]
    adapted = (rank > 0)[:, None] & known[None]
    if ACT is None:
        y = tl.load(y_at, adapted, 0.0)
    else:
        y = tl.load(y_at, inside, 0.0)
        up = tl.load(y_at + HALF, inside, 0.0)
    y = row_deltas(y, bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, rank, part, t, n, known, P, R,
                   ROOM, O, BR)  # fmt: skip
    tl.store(y_at, y, adapted)
    if ACT is not None:
        up = row_deltas(up, up_bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, up_rank, 1, t,
                        HALF + n, known, P, R, ROOM, O, BR)  # fmt: skip
        tl.store(y_at + HALF, up, (up_rank > 0)[:, None] & known[None])
        a = activate(y.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(act_ptr + t.to(tl.int64)[:, None] * HALF + n[None], a.to(y.dtype), inside)


def launch_shrink(
    y: Tensor,
    x: Tensor,
    bank: LoraBank,
    rows: LoraRows,
    norm: FusedNorm | None = None,
    weight: Tensor | None = None,
    *,
    early: bool = True,
) -> Tensor:
    """v [T, P, R] of the rows of y; what is beyond a row's rank is undefined.

    norm: of one row; x is the norm's result, which is computed again. weight: of the base product,
    if that comes next: it is prefetched meanwhile, so memory is busy. early: the next kernel may
    begin before the one before this has ended, so it must wait for this one before it reads
    anything but weights. Else it begins where x is complete, and must wait before it reads v.
    """
    check_rows(y, bank, rows)
    _, parts, rank, inputs = bank.a.shape
    warps = 4 if inputs <= 4608 else 8
    columns = 256 * warps
    block = NUMBERS * 32 * warps // (cdiv(inputs, columns) * columns)
    block = 1 if len(y) == 1 or block < 2 else 2 if block < SHRINK_ROWS else SHRINK_ROWS
    add = norm is not None and norm.residual is not None
    given: tuple[Tensor | None, ...] = (x, None, None)
    numbers = (0.0, 0.0)
    if norm is not None:
        given, numbers = (norm.x, norm.residual, norm.weight), (norm.eps, norm.offset)
    v = torch.empty((len(y), parts, rank), dtype=torch.float32, device=y.device)
    times = ahead = 0
    if weight is not None:
        share = min(PREFETCH << 20, weight.nbytes) // weight.itemsize // (parts * rank) // 8 * 8
        times = cdiv(share, MAX_AHEAD)
        ahead = share // max(times, 1) // 8 * 8
    _shrink_rows(
        (cdiv(len(y), block) * parts * rank, 1, 1),
        (*given, rows.slots, bank.a, bank.ranks, weight if times else None, v),
        (len(y), *numbers),
        (
            x.stride(0), inputs, rows_per_input(y, x), parts, rank, bank.room, norm is not None,
            add, block, columns, ahead, times, early, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
    return v


def alignment(parts: tuple[int, ...]) -> int:
    """A power of two that divides all: outputs are loaded so many at a time, eight at most."""
    return min(8, *(size & -size for size in parts))


def launch_expand(
    y: Tensor, v: Tensor, bank: LoraBank, rows: LoraRows, act: FusedActivation | None = None
) -> None:
    """Add v B^T to y, and fill the result of act. v: of launch_shrink()."""
    columns = COLUMNS if act is None else COLUMNS // 2
    sizes = bank.parts if act is None else bank.parts[:1]
    tiles = sum(cdiv(size, columns) for size in sizes)
    _expand_rows(
        (cdiv(len(y), EXPAND_ROWS) * tiles, 1, 1),
        (
            v, rows.slots, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift, y,
            None if act is None else act.out,
        ),
        (len(y),),
        (
            y.stride(0), y.shape[1], len(bank.parts), bank.rank, bank.room,
            None if act is None else act.kind, tiles, alignment(bank.parts), EXPAND_ROWS, RANKS,
            columns, PDL_ENABLED,
        ),
        warps=EXPAND_WARPS if act is None else EXPAND_WARPS // 2,
        pdl=PDL_ENABLED,
    )  # fmt: skip
