"""Small-M product from a ring in shared memory: few rows times a weight on the tensor cores.

    z = x W^T + bias        a = act(gate) * up

Time is the bytes of the weights. A program streams a band of rows of W through stages of shared
memory. It begins to fill all of them before it waits for the previous kernel, so memory is busy
while that one ends; rows of x follow into stages of their own, and all warps read them. Sums run
along the inputs in one order: a row of the result depends on its row of x and on the plan alone.

Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.small_m_registers import store_products
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

_SHARED_BYTES = 227 * 1024


@gluon.jit
def copy_weights(ring, up_ring, stage, w_at, at, ACT: gl.constexpr, O: gl.constexpr,
                  I: gl.constexpr):  # fmt: skip
    """Begin to copy columns `at` and following of the band, of both halves, to a stage."""
    async_copy.async_copy_global_to_shared(
        ring.index(stage), w_at + at, eviction_policy="evict_first"
    )
    if ACT is not None:
        async_copy.async_copy_global_to_shared(
            up_ring.index(stage), w_at + (O * I + at), eviction_policy="evict_first"
        )


@kernel("T", jit=gluon.jit)
def _small_m_ring(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], or None
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    T,
    O: gl.constexpr,
    I: gl.constexpr,
    X_T: gl.constexpr,
    ACT: gl.constexpr,  # None, or a kind
    TP: gl.constexpr,  # rows of x of a program, 8 at least
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDE: gl.constexpr = 32 if BK >= 256 else BK // 8  # threads of a row
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
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
        wait_for_previous_kernel()
    for s in gl.static_range(STAGES):
        x_ring.index(s).store(gl.load(x_at + s * BK))
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
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    columns = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, MMA))
    store_products(acc, ups, rows, columns, bias_ptr, z_ptr, a_ptr, T, O, ACT)


class RingPlan(NamedTuple):
    """Split of a product.

    rows: of x of a program; outputs: of a program (of each half); columns: of a stage; stages;
    warps: 16 outputs or more each.
    """

    rows: int
    outputs: int
    columns: int
    stages: int
    warps: int


def fits(plan: RingPlan, outputs: int, inputs: int, pair: bool) -> bool:
    """Whether the plan divides the weight evenly, and its stages fit a multiprocessor."""
    rows = plan.rows + plan.outputs * (2 if pair else 1)
    return (
        not inputs % plan.columns
        and plan.stages <= inputs // plan.columns
        and not outputs % plan.outputs
        and plan.outputs >= 16 * plan.warps
        and 2 * rows * plan.columns * plan.stages <= _SHARED_BYTES
    )


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: FusedActivation | None,
    plan: RingPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too. The plan must fit."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    _small_m_ring(
        (cdiv(x.shape[0], plan.rows), outputs // plan.outputs, 1),
        (x, weight, bias, z, None if act is None else act.out),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), None if act is None else act.kind, plan.rows,
            plan.outputs, plan.columns, plan.stages, plan.warps, PDL_ENABLED,
        ),
        warps=plan.warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
