"""Product of two to 32 rows from a ring in shared memory, with adapters on the tensor cores.

    v = A x                             the launch before (few_rows.py)
    z = x W^T + bias, then v B^T        as small_m_ring.py, with its bits
    a = act(gate) * up

Rows of one adapter are a group, in the order of LoraRows. B of the first groups goes to registers
while W is read, once for all rows of a group. Then each group is one more slice of the product,
of 16 ranks, in which v of all other rows is zero. v is two numbers of the weight's dtype, which
together have its 16 upper bits; so the sum of a row depends on no other row.

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
from quire.kernels.gpu.linear.small_m_ring import RingPlan, copy_weights
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

MAX_RANK = 16
"""Of a bank: one slice of the tensor cores."""
GROUPS = 8
"""Groups whose B is in registers before v is there. That of others is read then."""


@gluon.jit
def _find_group(at, order_ptr, slot_ptr, start_ptr, T):
    """(slot of the group whose rows begin at `at` of the order, whether there is one, where the
    next group begins)."""
    row = gl.load(order_ptr + gl.minimum(at, T - 1))
    slot = gl.maximum(gl.load(slot_ptr + row), 0)
    return slot, (at < T).to(gl.int32), gl.load(start_ptr + slot + 1)


@gluon.jit
def _load_b(b_at, rank_ptr, slot, there, part, r, P: gl.constexpr, SIZE: gl.constexpr):
    """B of a group for the program's outputs [BN, R], zero beyond its rank."""
    rank = gl.load(rank_ptr + slot * P + part) * there
    return gl.load(b_at + slot.to(gl.int64) * SIZE, (r < rank)[None, :], 0.0)


@gluon.jit
def _load_v(v_ptr, slot_ptr, rank_ptr, t, r, part, T, dtype: gl.constexpr, P: gl.constexpr,
            R: gl.constexpr):  # fmt: skip
    """(slot of each row [TP], the upper and the lower half of v [R, TP])."""
    found = gl.load(slot_ptr + gl.minimum(t, T - 1))
    slot = gl.maximum(found, 0)
    rank = gl.load(rank_ptr + slot * P + part)
    live = (r[:, None] < rank[None, :]) & ((t < T) & (found >= 0))[None, :]
    v = gl.load(v_ptr + (t * P + part)[None, :] * R + r[:, None], live, 0.0)
    high = v.to(dtype)
    return slot, high, (v - high.to(gl.float32)).to(dtype)


@gluon.jit
def _multiply_group(sums, b, slot, slots, high, low):
    """sums [BN, TP] with one group's adapter."""
    mine = (slots == slot)[None, :]
    sums = mma_v2(b, gl.where(mine, high, 0.0).to(b.dtype), sums)
    return mma_v2(b, gl.where(mine, low, 0.0).to(b.dtype), sums)


@gluon.jit
def _finish(z, sums, factor_ptr, shift_ptr, slot, adapted, n, WIDTH: gl.constexpr):
    """z [BN, TP], rounded, with its rows' adapters."""
    y = z.to(gl.float32)
    inside = adapted[None, :] & (n < WIDTH)[:, None]
    at = slot.to(gl.int64)[None, :] * WIDTH + n[:, None]
    if factor_ptr is not None:
        y *= gl.load(factor_ptr + at, inside, 0.0)
    if shift_ptr is not None:
        y += gl.load(shift_ptr + at, inside, 0.0)
    return gl.where(adapted[None, :], (y + sums).to(z.dtype), z)


@kernel("T", jit=gluon.jit)
def _small_m_ring_groups(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], or None
    slot_ptr,  # [T]
    order_ptr,  # [T]
    start_ptr,  # [S + 1]
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
    TP: gl.constexpr,  # rows of x of a program, 8 at least
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    GROUPS: gl.constexpr,
    LATE: gl.constexpr,  # x is complete when this begins
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDE: gl.constexpr = 32 if BK >= 256 else BK // 8  # threads of a row
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    WIDTH: gl.constexpr = O if ACT is None else 2 * O
    SIZE: gl.constexpr = ROOM * WIDTH
    dtype: gl.constexpr = w_ptr.dtype.element_ty
    STEPS: gl.constexpr = I // BK
    ring = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], SHARED)
    up_ring = ring
    if ACT is not None:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], SHARED)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TP, BK], SHARED)
    first = gl.program_id(1) * BN
    o = first + gl.arange(0, BN, gl.SliceLayout(1, COPY))
    t = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(1, COPY))
    k = gl.arange(0, BK, gl.SliceLayout(0, COPY))[None, :]
    w_at = w_ptr + o.to(gl.int64)[:, None] * I + k
    x_at = x_ptr + gl.minimum(t, T - 1).to(gl.int64)[:, None] * X_T + k
    for s in gl.static_range(STAGES):
        copy_weights(ring, up_ring, s, w_at, s * BK, ACT, O, I)
        async_copy.commit_group()
    if PDL:
        launch_dependents()
        if not LATE:
            wait_for_previous_kernel()
    for s in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(x_ring.index(s), x_at + s * BK)
        async_copy.commit_group()
    part = 0
    if ACT is None:
        for p in gl.static_range(P - 1):
            part += (first >= gl.load(bound_ptr + p + 1)).to(gl.int32)
    r = gl.arange(0, R, gl.SliceLayout(0, A))
    n = first + gl.arange(0, BN, gl.SliceLayout(1, A))
    b_at = b_ptr + r[None, :] * WIDTH + n[:, None]
    at = gl.load(start_ptr)
    slots = ()
    bs = ()
    up_bs = ()
    for _ in gl.static_range(GROUPS):
        slot, there, at = _find_group(at, order_ptr, slot_ptr, start_ptr, T)
        slots = slots + (slot,)  # type: ignore[assignment]
        bs = bs + (_load_b(b_at, rank_ptr, slot, there, part, r, P, SIZE),)  # type: ignore[assignment]
        if ACT is not None:
            up_bs = up_bs + (_load_b(b_at + O, rank_ptr, slot, there, 1, r, P, SIZE),)  # type: ignore[assignment]
    acc = gl.zeros([BN, TP], gl.float32, MMA)
    ups = acc
    for i in range(STEPS):
        stage = i % STAGES
        async_copy.wait_group(STAGES - 1)  # each step commits a group, so this one's has arrived
        x = x_ring.index(stage).permute((1, 0)).load(B)
        acc = mma_v2(ring.index(stage).load(A), x, acc)
        if ACT is not None:
            ups = mma_v2(up_ring.index(stage).load(A), x, ups)
        gl.thread_barrier()  # every warp has read the stage
        if i + STAGES < STEPS:
            copy_weights(ring, up_ring, stage, w_at, (i + STAGES) * BK, ACT, O, I)
            async_copy.async_copy_global_to_shared(x_ring.index(stage), x_at + (i + STAGES) * BK)
        async_copy.commit_group()
    outputs = first + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + outputs).to(gl.float32)[:, None]
        if ACT is not None:
            ups += gl.load(bias_ptr + O + outputs).to(gl.float32)[:, None]
    if PDL and LATE:
        wait_for_previous_kernel()
    row = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, B))
    ranks = gl.arange(0, R, gl.SliceLayout(1, B))
    owner, high, low = _load_v(v_ptr, slot_ptr, rank_ptr, row, ranks, part, T, dtype, P, R)
    sums = gl.zeros([BN, TP], gl.float32, MMA)
    up_sums = sums
    if ACT is not None:
        _, up_high, up_low = _load_v(v_ptr, slot_ptr, rank_ptr, row, ranks, 1, T, dtype, P, R)
    for g in gl.static_range(GROUPS):
        sums = _multiply_group(sums, bs[g], slots[g], owner, high, low)
        if ACT is not None:
            up_sums = _multiply_group(up_sums, up_bs[g], slots[g], owner, up_high, up_low)
    while at < T:
        slot, there, at = _find_group(at, order_ptr, slot_ptr, start_ptr, T)
        b = _load_b(b_at, rank_ptr, slot, there, part, r, P, SIZE)
        sums = _multiply_group(sums, b, slot, owner, high, low)
        if ACT is not None:
            b = _load_b(b_at + O, rank_ptr, slot, there, 1, r, P, SIZE)
            up_sums = _multiply_group(up_sums, b, slot, owner, up_high, up_low)
    row = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, MMA))
    live = (row < T)[None, :] & (outputs < O)[:, None]
    found = gl.load(slot_ptr + gl.minimum(row, T - 1))
    slot = gl.maximum(found, 0)
    adapted = (found >= 0) & (gl.load(rank_ptr + slot * P + part) > 0)
    z = _finish(acc.to(dtype), sums, factor_ptr, shift_ptr, slot, adapted, outputs, WIDTH)
    row = row.to(gl.int64)[None, :]
    z_at = z_ptr + row * WIDTH + outputs[:, None]
    gl.store(z_at, z, live)
    if ACT is not None:
        adapted = (found >= 0) & (gl.load(rank_ptr + slot * P + 1) > 0)
        up = _finish(ups.to(dtype), up_sums, factor_ptr, shift_ptr, slot, adapted, O + outputs,
                     WIDTH)  # fmt: skip
        gl.store(z_at + O, up, live)
        a = activate(z.to(gl.float32), ACT) * up.to(gl.float32)
        gl.store(a_ptr + row * O + outputs[:, None], a.to(dtype), live)


def supports(bank: LoraBank, plan: RingPlan) -> bool:
    """Whether a program's outputs are of one part, and its ranks one slice. In float16 v may be too
    large."""
    fits = bank.rank <= MAX_RANK and all(size % plan.outputs == 0 for size in bank.parts)
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
    plan: RingPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias and their adapters; fills act's result too. v, late: of
    launch_shrink(). The plan must fit."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    _small_m_ring_groups(
        (-(-x.shape[0] // plan.rows), outputs // plan.outputs, 1),
        (
            x, weight, bias, rows.slots, rows.order, rows.starts, bank.b, bank.ranks, bank.bounds,
            bank.factor, bank.shift, v, z, None if act is None else act.out,
        ),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), len(bank.parts), bank.rank, bank.room,
            None if act is None else act.kind, plan.rows, plan.outputs, plan.columns, plan.stages,
            plan.warps, GROUPS, late, PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
