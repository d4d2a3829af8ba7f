"""Product of few rows by bands, with adapters on the tensor cores: one launch behind shrink.

    v = A x                             the launch before (few_rows.py)
    z = x W^T + bias, then v B^T        as small_m_bands.py, with its bits; without its norm
    a = act(gate) * up

Each of a program's warps has some of the rows: B of their adapters goes to its registers while a
band of W is read, and is one more slice of the product, of 16 ranks (of 32 where gate and up have
an A each), in which v of all other rows is zero. v is two numbers of the weight's dtype, which
together have its 16 upper bits. The sum of a row depends on no other row.

z is rounded before the adapters' part is added, as where both are ops of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.small_m_bands import BAND, MAX_ROWS, BandsPlan, _row_of_band
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

MAX_RANK = 16
"""Of a bank: one slice of the tensor cores."""


@gluon.jit
def _part_of_band(bound_ptr, band, P: gl.constexpr, ACT: gl.constexpr):
    """The part of a band's outputs; with an activation that of its first eight."""
    part = 0
    if ACT is None:
        for p in gl.static_range(P - 1):
            part += (band * 16 >= gl.load(bound_ptr + p + 1)).to(gl.int32)
    return part


@gluon.jit
def _find_rank(slot_ptr, rank_ptr, row, part, r, T, P: gl.constexpr):
    """(slot of rows, whether their adapters have rank r in a part)."""
    found = gl.load(slot_ptr + gl.minimum(row, T - 1))
    slot = gl.maximum(found, 0)
    rank = gl.load(rank_ptr + slot * P + part)
    return slot, (row < T) & (found >= 0) & (r < rank)


@gluon.jit
def _load_b(b_ptr, slot_ptr, rank_ptr, warp, k, part, j, n, T, P: gl.constexpr, R: gl.constexpr,
            SIZE: gl.constexpr, WIDTH: gl.constexpr, ACT: gl.constexpr, WK: gl.constexpr,
            Q: gl.constexpr):  # fmt: skip
    """B of each warp's rows, [WK, 16, K], zero beyond their ranks. k: rows, of each its parts, of
    each its ranks; an output has those of its own part."""
    half = k % Q // R
    slot, live = _find_rank(slot_ptr, rank_ptr, warp + k // Q * WK, part + half, k % R, T, P)
    live = live & (j >= 0)
    if ACT is not None:
        live = live & ((j >= 8).to(gl.int32) == half)
    return gl.load(b_ptr + slot.to(gl.int64) * SIZE + (k % R * WIDTH + n), live, 0.0)


@gluon.jit
def _load_v(v_ptr, slot_ptr, rank_ptr, warp, k, part, t, T, dtype: gl.constexpr, P: gl.constexpr,
            R: gl.constexpr, WK: gl.constexpr, Q: gl.constexpr):  # fmt: skip
    """The upper and the lower half of v of each warp's rows, [WK, K, 8], zero for other rows."""
    row = warp + k // Q * WK
    mine = part + k % Q // R
    _, live = _find_rank(slot_ptr, rank_ptr, row, mine, k % R, T, P)
    v = gl.load(v_ptr + (t * P + mine) * R + k % R, live & (t == row), 0.0)
    high = v.to(dtype)
    return high, (v - high.to(gl.float32)).to(dtype)


@gluon.jit
def _add_deltas(z, sums, slot_ptr, rank_ptr, factor_ptr, shift_ptr, part, j, n, t, T,
                P: gl.constexpr, WIDTH: gl.constexpr, ACT: gl.constexpr,
                dtype: gl.constexpr):  # fmt: skip
    """z [16, 8], rounded, with its rows' adapters, rounded again."""
    found = gl.load(slot_ptr + gl.minimum(t, T - 1))
    slot = gl.maximum(found, 0)
    mine = part + j * 0
    if ACT is not None:
        mine = (j >= 8).to(gl.int32)
    adapted = (found >= 0) & (t < T) & (gl.load(rank_ptr + slot * P + mine) > 0)
    y = z
    at = slot.to(gl.int64) * WIDTH + n
    if factor_ptr is not None:
        y = y * gl.load(factor_ptr + at, adapted, 0.0)
    if shift_ptr is not None:
        y = y + gl.load(shift_ptr + at, adapted, 0.0)
    return gl.where(adapted, (y + sums).to(dtype).to(gl.float32), z)


@kernel("T", jit=gluon.jit)
def _small_m_bands_lora(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], or None
    slot_ptr,  # [T]
    b_ptr,  # [S, ROOM, O], or [S, ROOM, 2 * O] if ACT
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # as a row of b for each slot, or None
    shift_ptr,  # as factor_ptr
    v_ptr,  # [T, P, R]
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    T,
    O: gl.constexpr,
    I: gl.constexpr,
    X_T: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    ROOM: gl.constexpr,
    ACT: gl.constexpr,  # None, or a kind
    WK: gl.constexpr,  # warps
    BK: gl.constexpr,  # inputs of a warp in a stage
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    LATE: gl.constexpr,  # x is complete when this begins
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    WIDE: gl.constexpr = 32 if BK >= 256 else BK // 8  # threads of a row
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // WIDE, WIDE], [WK, 1, 1], [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    STEPS: gl.constexpr = I // (BK * WK)
    BANDS: gl.constexpr = O // 16 if ACT is None else O // 8
    WIDTH: gl.constexpr = O if ACT is None else 2 * O
    SIZE: gl.constexpr = ROOM * WIDTH
    Q: gl.constexpr = R if ACT is None else 2 * R  # ranks of a row
    K: gl.constexpr = 8 // WK * Q  # of a warp's rows
    ring = gl.allocate_shared_memory(dtype, [STAGES, WK, 16, BK], SHARED)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, WK, 8, BK], SHARED)
    first = gl.program_id(0)
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :][:, :, None]
    warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None][:, :, None]
    i = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, :][:, None, :]
    columns = warp * BK + i
    total = (BANDS - first + PROGRAMS - 1) // PROGRAMS * STEPS
    for s in gl.static_range(STAGES):
        if s < total:
            w_at = w_ptr + _row_of_band(first + s // STEPS * PROGRAMS, j, O, ACT).to(gl.int64) * I
            async_copy.async_copy_global_to_shared(
                ring.index(s), w_at + (columns + s % STEPS * (BK * WK)),
                eviction_policy="evict_first",
            )  # fmt: skip
        async_copy.commit_group()
    if PDL:
        launch_dependents()
        if not LATE:
            wait_for_previous_kernel()
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    t = gl.arange(0, 8, OF_ROW)[None, :][:, :, None]
    live = (t < T) & (columns >= 0)
    x_at = x_ptr + t * X_T + columns
    # the first stages of x pass through registers: a copy would arrive after all of W's before it
    for s in gl.static_range(STAGES):
        if s < total:
            x_ring.index(s).store(gl.load(x_at + s % STEPS * (BK * WK), live, 0.0))
    o = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, SUM))[None, :]
    left_warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None][:, :, None]
    left_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :][:, :, None]
    left_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :][:, None, :]
    right_warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None][:, :, None]
    right_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :][:, :, None]
    right_t = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, :][:, None, :]
    high = gl.zeros([WK, K, 8], dtype, B)
    low = high
    held = -1  # the part whose v they are
    step = 0
    for band in range(first, BANDS, PROGRAMS):
        part = _part_of_band(bound_ptr, band, P, ACT)
        n = _row_of_band(band, left_j, O, ACT)
        b = _load_b(b_ptr, slot_ptr, rank_ptr, left_warp, left_k, part, left_j, n, T, P, R, SIZE,
                    WIDTH, ACT, WK, Q)  # fmt: skip
        acc = gl.zeros([WK, 16, 8], gl.float32, MMA)
        for _ in range(STEPS):
            stage = step % STAGES
            async_copy.wait_group(STAGES - 1)  # each step commits a group: this one's has arrived
            right = x_ring.index(stage).permute((0, 2, 1)).load(B)
            acc = mma_v2(ring.index(stage).load(A), right, acc)
            gl.thread_barrier()  # every warp has read the stage
            ahead = step + STAGES
            if ahead < total:
                its_band = first + ahead // STEPS * PROGRAMS
                at = columns + ahead % STEPS * (BK * WK)
                w_at = w_ptr + _row_of_band(its_band, j, O, ACT).to(gl.int64) * I
                async_copy.async_copy_global_to_shared(
                    ring.index(stage), w_at + at, eviction_policy="evict_first"
                )
                async_copy.async_copy_global_to_shared(
                    x_ring.index(stage), x_at + ahead % STEPS * (BK * WK), mask=live
                )
            async_copy.commit_group()
            step += 1
        if PDL and LATE:
            if band == first:
                wait_for_previous_kernel()
        if part != held:
            high, low = _load_v(v_ptr, slot_ptr, rank_ptr, right_warp, right_k, part, right_t, T,
                                dtype, P, R, WK, Q)  # fmt: skip
            held = part
        sums = gl.zeros([WK, 16, 8], gl.float32, MMA)
        sums = mma_v2(b, high, sums)
        sums = mma_v2(b, low, sums)
        outputs = _row_of_band(band, o, O, ACT)
        z = gl.sum(acc, 0)
        if bias_ptr is not None:
            z += gl.load(bias_ptr + outputs).to(gl.float32)
        z = z.to(dtype).to(gl.float32)
        z = _add_deltas(z, gl.sum(sums, 0), slot_ptr, rank_ptr, factor_ptr, shift_ptr, part, o,
                        outputs, row, T, P, WIDTH, ACT, dtype)  # fmt: skip
        if ACT is None:
            gl.store(z_ptr + row * O + outputs, z.to(dtype), (row < T) & (outputs < O))
        else:
            _store_halves(z, band, z_ptr, a_ptr, T, O, ACT, WK)


@gluon.jit
def _store_halves(z, band, z_ptr, a_ptr, T, O: gl.constexpr, ACT: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """Store eight outputs of both halves, and what is activated. z: [16, 8], rounded."""
    out: gl.constexpr = z_ptr.dtype.element_ty
    HALF: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    gate, up = gl.split(gl.permute(gl.reshape(z, (2, 8, 8)), (1, 2, 0)))
    gate = gl.convert_layout(gate, HALF)
    up = gl.convert_layout(up, HALF)
    o = (band * 8 + gl.arange(0, 8, gl.SliceLayout(1, HALF)))[:, None]
    t = gl.arange(0, 8, gl.SliceLayout(0, HALF))[None, :]
    live = (t < T) & (o < O)
    gl.store(z_ptr + t * (2 * O) + o, gate.to(out), live)
    gl.store(z_ptr + t * (2 * O) + O + o, up.to(out), live)
    gl.store(a_ptr + t * O + o, (activate(gate, ACT) * up).to(out), live)


def supports(bank: LoraBank) -> bool:
    """Whether a band's outputs are of one part, and its ranks one slice. In float16 v may be too
    large."""
    fits = bank.rank <= MAX_RANK and all(size % BAND == 0 for size in bank.parts)
    return fits and bank.a.dtype == torch.bfloat16


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: LoraBank,
    rows: LoraRows,
    v: Tensor,
    late: bool,
    act: FusedActivation | None,
    plan: BandsPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias and their adapters; fills act's result too. v, late: of
    launch_shrink(). The plan must fit."""
    assert len(x) <= MAX_ROWS, x.shape
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    programs = min(plan.programs, total // BAND)
    _small_m_bands_lora(
        (programs, 1, 1),
        (
            x, weight, bias, rows.slots, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift,
            v, z, None if act is None else act.out,
        ),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), len(bank.parts), bank.rank, bank.room,
            None if act is None else act.kind, *plan[:3], programs, late, PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
