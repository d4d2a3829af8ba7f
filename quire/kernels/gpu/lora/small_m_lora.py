"""Small-M GEMM with adapters: product, shrink, expand and activation of a few rows in one launch.

    v = A x                             the first programs (handover.py)
    z = x W^T + bias, then adapters     the others, as small_m_gemm.py, with its bits
    a = act(gate) * up

Behind its product a program adds v B^T, row by row: rows are few, and B of all their slots is
loaded at once, however many those are. z is rounded before, as where both are ops of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.small_m_gemm import load_weight_tile, plan_small_m
from quire.kernels.gpu.lora.handover import (
    STEP,
    TILE_ROWS,
    empty_v,
    plan_shrink,
    read_progress,
    shrink_tiles,
    sum_v,
    wait_for_v,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)


@triton.jit
def _read_ranks(slot_ptr, rank_ptr, rows, part, P: tl.constexpr, TP: tl.constexpr):
    """(slot, rank of a part) of each row, numbers; (0, 0): it has no adapter."""
    slots, ranks = (), ()
    for t in tl.static_range(TP):
        found = tl.load(slot_ptr + t, t < rows, -1)
        slot = tl.maximum(found, 0)
        slots = slots + (slot,)  # type: ignore[assignment]
        ranks = ranks + (tl.load(rank_ptr + slot * P + part, found >= 0, 0),)  # type: ignore[assignment]
    return slots, ranks


@triton.jit
def _load_bs(b_ptr, slots, ranks, above, n, live, R: tl.constexpr, WIDTH: tl.constexpr,
             TP: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Ranks [above, above + BR) of B for outputs n, of each row's slot: TP times [BN, BR]."""
    r = above + tl.arange(0, BR)
    bs = ()
    for t in tl.static_range(TP):
        at = b_ptr + (slots[t].to(tl.int64) * R + r)[None] * WIDTH + n[:, None]
        bs = bs + (tl.load(at, (r < ranks[t])[None] & live[:, None], 0.0),)  # type: ignore[assignment]
    return bs


@triton.jit
def _add_deltas(z, bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slots, ranks, part, n, live, rows,
                R: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, SLICES: tl.constexpr,
                BN: tl.constexpr, TP: tl.constexpr, BR: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """z [BN, TP], each column with its row's adapter, rounded. bs: the first ranks of B."""
    column = tl.arange(0, TP)
    wide = column.to(tl.int64)
    rank, most = column * 0, 0
    for t in tl.static_range(TP):
        rank = tl.where(column == t, ranks[t], rank)
        most = tl.maximum(most, ranks[t])
    sums = tl.zeros((BN, TP), tl.float32)
    r = tl.arange(0, BR)
    for above in range(0, most, BR):
        read = wide < rows
        v = sum_v(v_ptr, wide, read & (rank > above), part, above, rows, P, R, SLICES, BR, True,
                  PDL)  # fmt: skip
        v = tl.where((above + r)[None] < rank[:, None], v, 0.0)
        for t in tl.static_range(TP):
            own = tl.sum(tl.where((column == t)[:, None], v, 0.0), 0)
            one = tl.sum(bs[t].to(tl.float32) * own[None], 1)
            sums = tl.where((column == t)[None], sums + one[:, None], sums)
        bs = _load_bs(b_ptr, slots, ranks, above + BR, n, live, R, WIDTH, TP, BR)
    for t in tl.static_range(TP):
        if ranks[t] > 0:
            y = z.to(tl.float32)
            if factor_ptr is not None:
                y *= tl.load(factor_ptr + slots[t].to(tl.int64) * WIDTH + n, live, 0.0)[:, None]
            if shift_ptr is not None:
                y += tl.load(shift_ptr + slots[t].to(tl.int64) * WIDTH + n, live, 0.0)[:, None]
            z = tl.where((column == t)[None], (y + sums).to(z.dtype), z)
    return z


@triton.jit
def _multiply(x_ptr, w_ptr, bias_ptr, slot_ptr, b_ptr, rank_ptr, bound_ptr, factor_ptr,
              shift_ptr, v_ptr, progress_ptr, z_ptr, act_ptr, rows, X_T: tl.constexpr,
              I: tl.constexpr, O: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
              SLICES: tl.constexpr, SHRINKS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
              TP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
              STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    first = (tl.program_id(0) - SHRINKS) * BN
    UP: tl.constexpr = O * I
    WIDTH: tl.constexpr = O if ACT is None else 2 * O
    SIZE: tl.constexpr = BN * I * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    k = tl.arange(0, BK)
    t = tl.arange(0, TP)
    n = first + tl.arange(0, BN)
    live = n < O
    part = 0
    if ACT is None:
        for p in tl.static_range(P - 1):
            part += (first >= tl.load(bound_ptr + p + 1)).to(tl.int32)
    slots, ranks = _read_ranks(slot_ptr, rank_ptr, rows, part, P, TP)
    up_ranks = ranks
    if ACT is not None:
        _, up_ranks = _read_ranks(slot_ptr, rank_ptr, rows, 1, P, TP)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN <= O:
            prefetch_l2(w_ptr + first.to(tl.int64) * I, SIZE)
            if ACT is not None:
                prefetch_l2(w_ptr + UP + first.to(tl.int64) * I, SIZE)
        launch_dependents()
        wait_for_previous_kernel()
    wanted, count = read_progress(progress_ptr)
    acc = tl.zeros([BN, TP], tl.float32)
    ups = tl.zeros([BN, TP], tl.float32)
    x_at = x_ptr + tl.minimum(t, rows - 1).to(tl.int64)[None, :] * X_T
    for at in tl.range(0, I, BK, num_stages=STAGES):
        inside = (at + k < I)[:, None] & (t < rows)[None, :]
        x = tl.load(x_at + (at + k)[:, None], inside, 0.0)
        acc = tl.dot(load_weight_tile(w_ptr, n, k, at, O, I, BK), x, acc)
        if ACT is not None:
            ups = tl.dot(load_weight_tile(w_ptr + UP, n, k, at, O, I, BK), x, ups)
    if BIAS:
        acc += tl.load(bias_ptr + n, live, 0.0).to(tl.float32)[:, None]
        if ACT is not None:
            ups += tl.load(bias_ptr + O + n, live, 0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = acc.to(dtype)
    up = ups.to(dtype)
    bs = _load_bs(b_ptr, slots, ranks, 0, n, live, R, WIDTH, TP, BR)
    ups_bs = bs
    if ACT is not None:
        ups_bs = _load_bs(b_ptr, slots, up_ranks, 0, O + n, live, R, WIDTH, TP, BR)
    wait_for_v(progress_ptr, wanted, count, SHRINKS)
    wide = t.to(tl.int64)
    z = _add_deltas(z, bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slots, ranks, part, n, live, rows,
                    R, WIDTH, P, SLICES, BN, TP, BR, PDL)  # fmt: skip
    if ACT is not None:
        up = _add_deltas(up, ups_bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slots, up_ranks, 1, O + n,
                         live, rows, R, WIDTH, P, SLICES, BN, TP, BR, PDL)  # fmt: skip
    stored = live[:, None] & (t < rows)[None, :]
    tl.store(z_ptr + wide[None, :] * WIDTH + n[:, None], z, stored)
    if ACT is not None:
        tl.store(z_ptr + wide[None, :] * WIDTH + O + n[:, None], up, stored)
        a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(act_ptr + wide[None, :] * O + n[:, None], a.to(dtype), stored)


@kernel("rows")
def _small_m_lora(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    slot_ptr,  # [T]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
    a_ptr,  # [S, P, R, I]
    b_ptr,  # [S, R, O], or [S, R, 2 * O] if ACT
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # as a row of b for each slot, or None
    shift_ptr,  # as factor_ptr
    v_ptr,  # [SLICES, T, P, R] between the programs
    progress_ptr,  # int64, of the bank
    z_ptr,  # [T, O] or [T, 2 * O] out
    act_ptr,  # [T, O] out if ACT
    rows,
    X_T: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    SHRINK_BR: tl.constexpr,
    SHRINKS: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    TP: tl.constexpr,  # rows of x, 8 at least
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.program_id(0) < SHRINKS:
        shrink_tiles(x_ptr, order_ptr, start_ptr, a_ptr, rank_ptr, v_ptr, progress_ptr, rows, X_T,
                     I, S, S_PAD, 1, P, R, SLICES, STEPS, TILES, BM, SHRINK_BR, STEP,
                     False, PDL)  # fmt: skip
    else:
        _multiply(x_ptr, w_ptr, bias_ptr, slot_ptr, b_ptr, rank_ptr, bound_ptr,
                  factor_ptr, shift_ptr, v_ptr, progress_ptr, z_ptr, act_ptr, rows, X_T, I, O, P, R,
                  SLICES, SHRINKS, BIAS, ACT, TP, BN, BK, BR, STAGES, AHEAD,
                  PDL)  # fmt: skip


def supports(bank: LoraBank) -> bool:
    """Whether the adapters of rows that small_m_gemm.py multiplies can be computed with it: a
    program's outputs are of one part."""
    return all(size % 32 == 0 for size in bank.parts)


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: LoraBank,
    rows: LoraRows,
    act: FusedActivation | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias and their adapters; fills act's result too."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    count, (slots, parts, rank, _) = len(x), bank.a.shape
    band, width, columns, stages, warps, ahead = plan_small_m(count, outputs, act is not None)
    assert count <= width, "a program has all rows"
    shrink = plan_shrink(count, slots, parts, rank, inputs)
    _small_m_lora(
        (shrink.programs + cdiv(outputs, band), 1, 1),
        (
            x, weight, bias, rows.slots, rows.order, rows.starts, bank.a, bank.b, bank.ranks,
            bank.bounds, bank.factor, bank.shift, empty_v(shrink, z, parts, rank), bank.progress,
            z, None if act is None else act.out,
        ),
        (count,),
        (
            x.stride(0), inputs, outputs, slots, max(2, next_power_of_2(slots)), parts, rank,
            shrink.slices, shrink.steps, shrink.tiles, shrink.block, shrink.programs,
            bias is not None, None if act is None else act.kind, width, TILE_ROWS, band, columns,
            min(rank & -rank, 32), STEP, stages, ahead, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
