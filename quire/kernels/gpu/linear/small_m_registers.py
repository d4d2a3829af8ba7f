"""Small-M product from registers: few rows times a weight that goes straight to the tensor cores.

    z = x W^T + bias        a = act(gate) * up

Time is the bytes of the weights. A warp has a band of rows of W and a range of the inputs, and
loads slices of 32 inputs into the registers from which the tensor cores take them. The first
slices are loaded before it waits for the previous kernel, so memory is busy while that one ends. A
thread takes eight neighbours of a row where the instruction counts
every other pair: W and x are read alike, so sums have the same terms. The sums of the warps are
added at the end. A row of the result depends on its row of x and on the plan alone.

Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    wait_for_previous_kernel,
)

SLICE = 32
"""Inputs that a warp multiplies at once: eight of each of four threads."""


@gluon.jit
def store_products(z, up, o, t, bias_ptr, z_ptr, a_ptr, T, O: gl.constexpr, ACT: gl.constexpr):
    """Add the bias to sums [outputs, rows], activate, and store what the separate ops store."""
    WIDTH: gl.constexpr = O if ACT is None else 2 * O
    out: gl.constexpr = z_ptr.dtype.element_ty
    t = t.to(gl.int64)[None, :]
    if bias_ptr is not None:
        z += gl.load(bias_ptr + o).to(gl.float32)[:, None]
    z = z.to(out)
    o = o[:, None]
    live = (t < T) & (o < O)
    gl.store(z_ptr + t * WIDTH + o, z, live)
    if ACT is not None:
        if bias_ptr is not None:
            up += gl.load(bias_ptr + O + o).to(gl.float32)
        up = up.to(out)
        gl.store(z_ptr + t * WIDTH + O + o, up, live)
        a = activate(z.to(gl.float32), ACT) * up.to(gl.float32)
        gl.store(a_ptr + t * O + o, a.to(out), live)


@gluon.jit
def _load_slice(w_at, s, ACT: gl.constexpr, O: gl.constexpr, I: gl.constexpr):
    """Slice s of a warp's range, of both halves if there are two."""
    tile = gl.load(w_at + s * 32, eviction_policy="evict_first")
    if ACT is None:
        return (tile,)
    else:
        return tile, gl.load(w_at + (O * I + s * 32), eviction_policy="evict_first")


@kernel("T", jit=gluon.jit)
def _small_m_registers(
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
    WK: gl.constexpr,  # warps that share the inputs
    AHEAD: gl.constexpr,  # slices that a warp loads ahead
    PDL: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WK, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    EACH: gl.constexpr = I // (32 * WK)
    TURNS: gl.constexpr = EACH // AHEAD
    first = gl.program_id(1) * BN
    warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None][:, :, None]
    o = first + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :][:, :, None]
    j = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :][:, None, :]
    w_at = w_ptr + o.to(gl.int64) * I + (warp * (EACH * 32) + j)
    held = ()
    for d in gl.static_range(AHEAD):
        held = held + (_load_slice(w_at, d, ACT, O, I),)
    t = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    t = gl.minimum(t, T - 1)[None, :][:, None, :]
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :][:, :, None]
    x_warp = gl.arange(0, WK, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None][:, :, None]
    x_at = x_ptr + t.to(gl.int64) * X_T + (x_warp * (EACH * 32) + k)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    acc = gl.zeros([WK, BN, TP], gl.float32, MMA)
    ups = acc
    for turn in range(TURNS - 1):
        xs = ()
        for d in gl.static_range(AHEAD):
            xs = xs + (gl.load(x_at + (turn * AHEAD + d) * 32),)
        for d in gl.static_range(AHEAD):
            acc = gl.nvidia.ampere.mma_v2(held[0][0], xs[d], acc)
            if ACT is not None:
                ups = gl.nvidia.ampere.mma_v2(held[0][1], xs[d], ups)
            held = held[1:] + (_load_slice(w_at, (turn + 1) * AHEAD + d, ACT, O, I),)
    for d in gl.static_range(AHEAD):
        x = gl.load(x_at + ((TURNS - 1) * AHEAD + d) * 32)
        acc = gl.nvidia.ampere.mma_v2(held[d][0], x, acc)
        if ACT is not None:
            ups = gl.nvidia.ampere.mma_v2(held[d][1], x, ups)
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, SUM))
    columns = gl.program_id(0) * TP + gl.arange(0, TP, gl.SliceLayout(0, SUM))
    z = gl.sum(acc, 0)
    up = gl.sum(ups, 0) if ACT is not None else z
    store_products(z, up, rows, columns, bias_ptr, z_ptr, a_ptr, T, O, ACT)


class RegistersPlan(NamedTuple):
    """Split of a product.

    rows: of x of a program; outputs: of a program (of each half); deep: warps that share the
    inputs; ahead: slices that a warp loads ahead.
    """

    rows: int
    outputs: int
    deep: int
    ahead: int


def fits(plan: RegistersPlan, outputs: int, inputs: int) -> bool:
    """Whether the plan divides the weight evenly."""
    return not inputs % (SLICE * plan.deep * plan.ahead) and not outputs % plan.outputs


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: FusedActivation | None,
    plan: RegistersPlan,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too. The plan must fit."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    _small_m_registers(
        (cdiv(x.shape[0], plan.rows), outputs // plan.outputs, 1),
        (x, weight, bias, z, None if act is None else act.out),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), None if act is None else act.kind, plan.rows,
            plan.outputs, plan.deep, plan.ahead, PDL_ENABLED,
        ),
        warps=plan.deep,
        pdl=PDL_ENABLED,
    )  # fmt: skip
