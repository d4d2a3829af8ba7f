"""Small-M experts: matrix-vector products that read the weights of the chosen experts only.

    up      program (f, pair)    some rows of gate and up of one pair's expert -> h [P, F]
    down    program (e, t)       some outputs of one token, over all its experts, weighted

A pair is a token and one of its experts. The bound is memory, so each program has its loads in
flight at once; `down` has the experts before `up` has ended and fetches their weights meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.linear.gemv import dot_rows, load_vector, load_weight_rows
from quire.kernels.gpu.moe.moe_gate import apply_gate
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel
from quire.kernels.moe_experts import ExpertActivation


@kernel()
def _up(
    x_ptr,  # [T, E]
    id_ptr,  # [T, TOP]
    w_ptr,  # [X, 2F, E]
    bias_ptr,  # [X, 2F] or None
    h_ptr,  # [T * TOP, F] out
    X_T: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TIMES: tl.constexpr,
    ABSENT: tl.constexpr,  # ids may be -1: such pairs have no h
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    t = pair // TOP
    start = tl.program_id(0) * (BLOCK_F * TIMES)
    k = tl.arange(0, BLOCK_E)
    C: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    xs = load_vector(x_ptr + t * X_T, k, E, BLOCK_E, C)
    expert = tl.load(id_ptr + pair).to(tl.int64)  # X * 2F * E can pass 2**31
    if ABSENT:
        if expert < 0:
            return
    PARTS: tl.constexpr = 1 if KIND == "relu2" else 2  # products: up alone, or gate and up
    gate_ptr = w_ptr + expert * (PARTS * F * E)
    n = start + tl.arange(0, BLOCK_F)
    gates = load_weight_rows(gate_ptr, n, k, F, E, BLOCK_E, C)
    up_ptr = gate_ptr + (PARTS - 1) * F * E
    ups = load_weight_rows(up_ptr, n, k, F, E, BLOCK_E, C)
    for g in tl.static_range(TIMES):
        n = start + g * BLOCK_F + tl.arange(0, BLOCK_F)
        if g + 1 < TIMES:  # in flight while this one is summed
            next_gates = load_weight_rows(gate_ptr, n + BLOCK_F, k, F, E, BLOCK_E, C)
            next_ups = load_weight_rows(up_ptr, n + BLOCK_F, k, F, E, BLOCK_E, C)
        gate = dot_rows(gates, xs, BLOCK_F, BLOCK_E, C, 1)
        up = gate
        if PARTS == 2:
            up = dot_rows(ups, xs, BLOCK_F, BLOCK_E, C, 1)
        if bias_ptr is not None:
            row = expert * (PARTS * F) + tl.minimum(n, F - 1)
            gate += tl.load(bias_ptr + row).to(tl.float32)
            up += tl.load(bias_ptr + row + (PARTS - 1) * F).to(tl.float32)
        h = apply_gate(gate, up, KIND, ALPHA, LIMIT)
        tl.store(h_ptr + pair * F + n, h.to(h_ptr.dtype.element_ty), n < F)
        if g + 1 < TIMES:
            gates, ups = next_gates, next_ups


@kernel()
def _down(
    h_ptr,  # [T * TOP, F]
    id_ptr,  # [T, TOP]
    weight_ptr,  # [T, TOP]
    w_ptr,  # [X, E, F]
    bias_ptr,  # [X, E] or None
    y_ptr,  # [T, E] out
    E: tl.constexpr,
    F: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    AHEAD: tl.constexpr,
    ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(1)
    es = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.minimum(es, E - 1)
    fs = tl.arange(0, BLOCK_F)
    CHUNKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    if PDL:
        launch_dependents()
    ahead = ()
    for c in tl.static_range(AHEAD):
        expert = tl.load(id_ptr + t * TOP + c // CHUNKS).to(tl.int64)  # X * E * F can pass 2**31
        f = (c % CHUNKS) * BLOCK_F + fs
        w_at = w_ptr + (expert * E + row)[:, None] * F + f[None]
        live = f < F
        if ABSENT:
            live &= expert >= 0
        ahead = ahead + (tl.load(w_at, live[None], 0.0),)  # type: ignore[assignment]
    if PDL:
        wait_for_previous_kernel()
    sums = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    y = tl.zeros((BLOCK_E,), tl.float32)
    for c in tl.static_range(TOP * CHUNKS):
        pair = t * TOP + c // CHUNKS
        f = (c % CHUNKS) * BLOCK_F + fs
        weight = tl.load(weight_ptr + pair)
        live = f < F
        here = tl.full((BLOCK_E,), True, tl.int1)
        if ABSENT:
            live &= tl.load(id_ptr + pair) >= 0
            here &= tl.load(id_ptr + pair) >= 0
        h = tl.load(h_ptr + pair * F + f, live, 0.0).to(tl.float32) * weight
        if c < AHEAD:
            w = ahead[c]  # type: ignore[var-annotated]
        else:
            expert = tl.load(id_ptr + pair).to(tl.int64)
            w = tl.load(w_ptr + (expert * E + row)[:, None] * F + f[None], live[None], 0.0)
        sums += w.to(tl.float32) * h[None]
        if bias_ptr is not None and c % CHUNKS == 0:
            expert = tl.load(id_ptr + pair).to(tl.int64)
            y += weight * tl.load(bias_ptr + expert * E + row, here, 0.0).to(tl.float32)
    y += tl.sum(sums, 1)
    tl.store(y_ptr + t * E + es, y.to(y_ptr.dtype.element_ty), es < E)


def chunk_width(width: int) -> int:
    """A power of two that divides the width if one of a useful size does."""
    whole = width & -width
    return min(max(whole, 256), 1024, next_power_of_2(width))


class SmallMMoEPlan(NamedTuple):
    """Split of the products.

    rows, columns, times: of gate and of up at once, and how often a program does so.
    outputs: of a program of the second product. warps: of either product's.
    ahead: columns of the second weight that a program holds before the first product has ended.
    """

    rows: int = 4
    columns: int = 1024
    repeats: int = 1
    warps: tuple[int, int] = (4, 4)
    outputs: int = 4
    prefetch: int = 3072


PLAN_ONE_ROW = SmallMMoEPlan(rows=1, columns=2048, repeats=6)
PLAN_FEW_ROWS = SmallMMoEPlan()
"""For one token and for more: the best of seventeen splits at 128 experts of 768 by 2,048."""


def experts_small_m(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    absent: bool = False,
    cut: SmallMMoEPlan | None = None,
) -> None:
    """moe_experts over few rows. cut: another split than the usual, for tuning."""
    (tokens, top), (size, width) = ids.shape, down.shape[1:]
    cut = cut or (PLAN_ONE_ROW if tokens == 1 else PLAN_FEW_ROWS)
    h = x.new_empty((tokens * top, width))
    consts: tuple[Any, ...] = (x.stride(0), size, width, gate.kind, gate.alpha, gate.limit, top)
    consts += (cut.rows, min(next_power_of_2(size), cut.columns), cut.repeats)
    consts += (absent, PDL_ENABLED)
    grid = (cdiv(width, cut.rows * cut.repeats), tokens * top, 1)
    _up(grid, (x, ids, gate_up, gate_up_bias, h), (), consts, cut.warps[0], pdl=PDL_ENABLED)
    wide = chunk_width(width)
    ahead = min(top * cdiv(width, wide), cut.prefetch // wide)
    grid = (cdiv(size, cut.outputs), tokens, 1)
    consts = (size, width, top, cut.outputs, wide, ahead, absent, PDL_ENABLED)
    _down(grid, (h, ids, weights, down, down_bias, out), (), consts, cut.warps[1], pdl=PDL_ENABLED)
