"""GEMV of a few rows without the tensor cores: gemv.py once per row, the weights loaded once.

    z[t] = W x[t] + bias        a[t] = act(gate) * up

A program holds a few whole rows of W in registers and multiplies them by one row of x after the
other; it reads those from the nearest cache. So the weights are loaded as early and as widely as
for one row, which for so few rows matters more than the tensor cores. Each row is summed in
the order of a single row: the result does not depend on the number of rows.

Axes: T rows, I inputs, O outputs (of one half, if there are halves).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    FusedActivation,
    GemvPlan,
    dot_rows,
    load_vector,
    load_weight_rows,
    plan_gemv,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel


@triton.jit
def _store_row(tiles, ups, x, n, k, t, bias_ptr, z_ptr, a_ptr, X_T: tl.constexpr, O: tl.constexpr,
          I: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Row t of the result for rows n of W."""
    xs = load_vector(x + t * X_T, k, I, BK, C)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = dot_rows(tiles, xs, BN, BK, C, 1)
    if BIAS:
        z += tl.load(bias_ptr + n, n < O, 0.0).to(tl.float32)
    z = z.to(dtype)
    if ACT is None:
        tl.store(z_ptr + t * O + n, z, n < O)
    else:
        up = dot_rows(ups, xs, BN, BK, C, 1)
        if BIAS:
            up += tl.load(bias_ptr + O + n, n < O, 0.0).to(tl.float32)
        up = up.to(dtype)
        tl.store(z_ptr + t * (2 * O) + n, z, n < O)
        tl.store(z_ptr + t * (2 * O) + O + n, up, n < O)
        a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(a_ptr + t * O + n, a.to(dtype), n < O)


@kernel()
def _gemv_rows(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    z_ptr,  # [T, O] or [T, 2 * O] out
    a_ptr,  # [T, O] out if ACT
    T: tl.constexpr,
    O: tl.constexpr,
    I: tl.constexpr,
    X_T: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    BN: tl.constexpr,
    BK: tl.constexpr,
    TIMES: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = (I + BK - 1) // BK
    UP: tl.constexpr = O * I if ACT is not None else 0
    k = tl.arange(0, BK)
    n = tl.program_id(0) * (BN * TIMES) + tl.arange(0, BN)
    tiles = load_weight_rows(w_ptr, n, k, O, I, BK, C)
    ups = load_weight_rows(w_ptr + UP, n, k, O, I, BK, C) if ACT is not None else tiles
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    for _ in range(TIMES - 1):
        next_tiles = load_weight_rows(
            w_ptr, n + BN, k, O, I, BK, C
        )  # in flight while these are summed
        next_ups = (
            load_weight_rows(w_ptr + UP, n + BN, k, O, I, BK, C) if ACT is not None else next_tiles
        )
        for t in range(T):
            _store_row(tiles, ups, x_ptr, n, k, t, bias_ptr, z_ptr, a_ptr,
                  X_T, O, I, BIAS, ACT, BN, BK, C)  # fmt: skip
        tiles, ups = next_tiles, next_ups
        n += BN
    for t in range(T):
        _store_row(tiles, ups, x_ptr, n, k, t, bias_ptr, z_ptr, a_ptr,
              X_T, O, I, BIAS, ACT, BN, BK, C)  # fmt: skip


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: FusedActivation | None = None,
    cut: GemvPlan | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias; fills act's result too."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    rows, columns, times, warps, _ = cut or plan_gemv(outputs, inputs, act is not None)
    _gemv_rows(
        (cdiv(outputs, rows * times), 1, 1),
        (x, weight, bias, z, None if act is None else act.out),
        (),
        (
            x.shape[0], outputs, inputs, x.stride(0), bias is not None,
            None if act is None else act.kind, rows, columns, times, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
