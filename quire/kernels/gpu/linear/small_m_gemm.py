"""Small-M GEMM kernel: few rows times a weight on the tensor cores, with the activation after it.

    z = x W^T + bias        a = act(gate) * up

Time is the bytes of the weights. A program streams a band of rows of W through shared memory
several stages deep and multiplies it by rows of x, all at once if they are few. W is the left
operand of the product, so that the few rows of x are its narrow side (8 wide at least). Sums run
along the inputs in one order, whatever the number of rows. Rounded where the separate ops round.

small_m_linear.py chooses between this and the kernels for fewer rows.
Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def load_weight_tile(w_ptr, n, k, at, O: tl.constexpr, I: tl.constexpr, BK: tl.constexpr):
    """Tile [BN, BK] of W from column `at`. Rows past the end repeat the last."""
    ptr = w_ptr + tl.minimum(n, O - 1).to(tl.int64)[:, None] * I + at + k[None, :]
    if I % BK == 0:
        return tl.load(ptr, eviction_policy="evict_first")
    else:
        return tl.load(ptr, (at + k < I)[None, :], 0.0, eviction_policy="evict_first")


@kernel("T")
def _small_m_gemm(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    T,
    O: tl.constexpr,
    I: tl.constexpr,
    X_T: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    TP: tl.constexpr,  # rows of x a program takes, 8 at least
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BN
    UP: tl.constexpr = O * I
    WIDTH: tl.constexpr = O if ACT is None else 2 * O
    SIZE: tl.constexpr = BN * I * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    k = tl.arange(0, BK)
    t = tl.program_id(1) * TP + tl.arange(0, TP)
    n = first + tl.arange(0, BN)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN <= O:
            prefetch_l2(w_ptr + first.to(tl.int64) * I, SIZE)
            if ACT is not None:
                prefetch_l2(w_ptr + UP + first.to(tl.int64) * I, SIZE)
        launch_dependents()
        wait_for_previous_kernel()
    acc = tl.zeros([BN, TP], tl.float32)
    ups = tl.zeros([BN, TP], tl.float32)
    rows = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * X_T
    for at in tl.range(0, I, BK, num_stages=STAGES):
        live = (at + k < I)[:, None] & (t < T)[None, :]
        x = tl.load(rows + (at + k)[:, None], live, 0.0)
        acc = tl.dot(load_weight_tile(w_ptr, n, k, at, O, I, BK), x, acc)
        if ACT is not None:
            ups = tl.dot(load_weight_tile(w_ptr + UP, n, k, at, O, I, BK), x, ups)
    live = (n < O)[:, None] & (t < T)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, n < O, 0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = acc.to(dtype)
    tl.store(z_ptr + t.to(tl.int64)[None, :] * WIDTH + n[:, None], z, live)
    if ACT is not None:
        if BIAS:
            ups += tl.load(bias_ptr + O + n, n < O, 0.0).to(tl.float32)[:, None]
        up = ups.to(dtype)
        tl.store(z_ptr + t.to(tl.int64)[None, :] * WIDTH + O + n[:, None], up, live)
        a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(a_ptr + t.to(tl.int64)[None, :] * O + n[:, None], a.to(dtype), live)


class SmallMPlan(NamedTuple):
    """Split of a product: rows of W and rows of x per program, columns per stage, stages.

    ahead: a program prefetches its whole band to L2 before it waits for the previous kernel.
    """

    rows: int
    width: int
    columns: int
    stages: int
    warps: int
    prefetch: bool = False


def plan_small_m(rows: int, outputs: int, pair: bool) -> SmallMPlan:
    """Bands that give each multiprocessor a program or two, each with 50 KB in flight."""
    width = max(8, min(64, next_power_of_2(rows)))
    if outputs <= 4096:
        return SmallMPlan(16, width, 256, 4, 1) if pair else SmallMPlan(16, width, 512, 3, 1)
    return SmallMPlan(32, width, 256, 4, 2)


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: FusedActivation | None = None,
    band: SmallMPlan | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    rows, width, columns, stages, warps, ahead = band or plan_small_m(
        x.shape[0], outputs, act is not None
    )
    _small_m_gemm(
        (cdiv(outputs, rows), cdiv(x.shape[0], width), 1),
        (x, weight, bias, z, None if act is None else act.out),
        (x.shape[0],),
        (
            outputs, inputs, x.stride(0), bias is not None, None if act is None else act.kind,
            width, rows, columns, stages, ahead, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
