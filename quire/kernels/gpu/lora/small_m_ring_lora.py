"""Product of few rows from a ring in shared memory, with adapters: one launch behind shrink.

    v = A x                             the launch before (few_rows.py)
    z = x W^T + bias, then v B^T        as small_m_ring.py, with its bits; B of all rows is on the
                                        way while W is read
    a = act(gate) * up

z is rounded before the adapters' part is added, as where both are ops of their own.
"""

from __future__ import annotations

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
"""Of a bank: a program has all ranks of B for its rows and outputs in registers."""


@gluon.jit
def _load_bs(b_ptr, slot, live, n, R: gl.constexpr, ROOM: gl.constexpr, WIDTH: gl.constexpr):
    """All ranks of B for live rows and outputs n: R times [BN, TP]."""
    bs = ()
    at = b_ptr + (slot * (ROOM * WIDTH))[None, :] + n[:, None]
    inside = live[None, :] & (n < WIDTH)[:, None]
    for r in gl.static_range(R):
        bs = bs + (gl.load(at + r * WIDTH, inside, 0.0),)  # type: ignore[assignment]
    return bs


@gluon.jit
def _add_deltas(z, bs, v_ptr, factor_ptr, shift_ptr, slot, rank, part, t, n, P: gl.constexpr,
                R: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """z [BN, TP] with the adapters of its rows, rounded. bs: of _load_bs()."""
    y = z.to(gl.float32)
    inside = (rank > 0)[None, :] & (n < WIDTH)[:, None]
    if factor_ptr is not None:
        y *= gl.load(factor_ptr + (slot * WIDTH)[None, :] + n[:, None], inside, 0.0)
    if shift_ptr is not None:
        y += gl.load(shift_ptr + (slot * WIDTH)[None, :] + n[:, None], inside, 0.0)
    sums = y - y
    v_at = v_ptr + (t * P + part) * R
    for r in gl.static_range(R):
        v = gl.load(v_at + r, rank > r, 0.0)
        sums += v[None, :] * gl.where((rank > r)[None, :], bs[r].to(gl.float32), 0.0)
    return gl.where((rank > 0)[None, :], (y + sums).to(z.dtype), z)


@kernel("T", jit=gluon.jit)
def _small_m_ring_lora(
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
    TP: gl.constexpr,  # rows of x of a program, 8 at least
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    LATE: gl.constexpr,  # x is complete when this begins
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDE: gl.constexpr = 32 if BK >= 256 else BK // 8  # threads of a row
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LINE: gl.constexpr = BN // 8  # threads of a row of B
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [LINE, 32 // LINE], [1, WARPS], [0, 1])
    WIDTH: gl.constexpr = O if ACT is None else 2 * O
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
    part = 0
    if ACT is None:
        for p in gl.static_range(P - 1):
            part += (first >= gl.load(bound_ptr + p + 1)).to(gl.int32)
    n = first + gl.arange(0, BN, gl.SliceLayout(1, OUT))
    row = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, OUT))
    found = gl.load(slot_ptr + row, row < T, -1)
    slot = gl.maximum(found, 0).to(gl.int64)
    rank = gl.load(rank_ptr + slot * P + part, found >= 0, 0)
    bs = _load_bs(b_ptr, slot, found >= 0, n, R, ROOM, WIDTH)
    if ACT is not None:
        up_rank = gl.load(rank_ptr + slot * P + 1, found >= 0, 0)
        up_bs = _load_bs(b_ptr, slot, found >= 0, O + n, R, ROOM, WIDTH)
    if PDL:
        launch_dependents()
        if not LATE:
            wait_for_previous_kernel()
    for s in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(x_ring.index(s), x_at + s * BK)
        async_copy.commit_group()
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
    z = gl.convert_layout(acc.to(dtype), OUT)
    if PDL and LATE:
        wait_for_previous_kernel()
    row = row.to(gl.int64)
    live = (row < T)[None, :] & (n < O)[:, None]
    z = _add_deltas(z, bs, v_ptr, factor_ptr, shift_ptr, slot, rank, part, row, n, P, R, WIDTH)
    z_at = z_ptr + row[None, :] * WIDTH + n[:, None]
    gl.store(z_at, z, live)
    if ACT is not None:
        up = gl.convert_layout(ups.to(dtype), OUT)
        up = _add_deltas(up, up_bs, v_ptr, factor_ptr, shift_ptr, slot, up_rank, 1, row, O + n, P,
                         R, WIDTH)  # fmt: skip
        gl.store(z_at + O, up, live)
        a = activate(z.to(gl.float32), ACT) * up.to(gl.float32)
        gl.store(a_ptr + row[None, :] * O + n[:, None], a.to(dtype), live)


def supports(bank: LoraBank, plan: RingPlan) -> bool:
    """Whether a program's outputs are of one part, and its rows of B fit its registers."""
    return bank.rank <= MAX_RANK and all(size % plan.outputs == 0 for size in bank.parts)


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
    _small_m_ring_lora(
        (-(-x.shape[0] // plan.rows), outputs // plan.outputs, 1),
        (
            x, weight, bias, rows.slots, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift,
            v, z, None if act is None else act.out,
        ),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), len(bank.parts), bank.rank, bank.room,
            None if act is None else act.kind, plan.rows, plan.outputs, plan.columns, plan.stages,
            plan.warps, late, PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
