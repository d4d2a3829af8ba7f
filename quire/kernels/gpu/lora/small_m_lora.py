"""Small-M GEMM with adapters: product, expand and activation of a few rows in one launch.

    v = A x                             the launch before (few_rows.py)
    z = x W^T + bias, then v B^T        as small_m_gemm.py, with its bits; B of all rows is on the
                                        way while W is read
    a = act(gate) * up

z is rounded before the adapters' part is added, as where both are ops of their own.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import FusedActivation
from quire.kernels.gpu.linear.small_m_gemm import load_weight_tile, plan_small_m
from quire.kernels.gpu.lora.few_rows import load_row_bs, read_slots, row_deltas
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)

RANKS = 16
"""Of B that a program has in registers while it multiplies: of both halves together."""


@kernel("rows")
def _small_m_lora(
    x_ptr,  # [T, I]
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    slot_ptr,  # [T]
    b_ptr,  # [S, ROOM, O], or [S, ROOM, 2 * O] if ACT
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # as a row of b for each slot, or None
    shift_ptr,  # as factor_ptr
    v_ptr,  # [T, P, R]
    z_ptr,  # [T, O] or [T, 2 * O] out
    act_ptr,  # [T, O] out if ACT
    rows,
    X_T: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    TP: tl.constexpr,  # rows of x, 8 at least
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,  # x is complete when this begins
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BN
    UP: tl.constexpr = O * I
    WIDTH: tl.constexpr = O if ACT is None else 2 * O
    SIZE: tl.constexpr = BN * I * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    k = tl.arange(0, BK)
    t = tl.arange(0, TP)
    n = first + tl.arange(0, BN)
    known = n < O
    part = 0
    if ACT is None:
        for p in tl.static_range(P - 1):
            part += (first >= tl.load(bound_ptr + p + 1)).to(tl.int32)
    slot, rank, live = read_slots(slot_ptr, rank_ptr, t, rows, part, P)
    bs = load_row_bs(b_ptr, slot, live, 0, n, known, ROOM, WIDTH, BR)
    if ACT is not None:
        _, up_rank, _ = read_slots(slot_ptr, rank_ptr, t, rows, 1, P)
        up_bs = load_row_bs(b_ptr, slot, live, 0, O + n, known, ROOM, WIDTH, BR)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN <= O:
            prefetch_l2(w_ptr + first.to(tl.int64) * I, SIZE)
            if ACT is not None:
                prefetch_l2(w_ptr + UP + first.to(tl.int64) * I, SIZE)
        launch_dependents()
        if not LATE:
            wait_for_previous_kernel()
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
        acc += tl.load(bias_ptr + n, known, 0.0).to(tl.float32)[:, None]
        if ACT is not None:
            ups += tl.load(bias_ptr + O + n, known, 0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    z = tl.trans(acc.to(dtype))
    if PDL and LATE:
        wait_for_previous_kernel()
    z = row_deltas(z, bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, rank, part, t, n, known, P, R,
                   ROOM, WIDTH, BR)  # fmt: skip
    stored = (t < rows)[:, None] & known[None]
    z_at = z_ptr + t.to(tl.int64)[:, None] * WIDTH + n[None]
    tl.store(z_at, z, stored)
    if ACT is not None:
        up = tl.trans(ups.to(dtype))
        up = row_deltas(up, up_bs, b_ptr, v_ptr, factor_ptr, shift_ptr, slot, up_rank, 1, t, O + n,
                        known, P, R, ROOM, WIDTH, BR)  # fmt: skip
        tl.store(z_at + O, up, stored)
        a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
        tl.store(act_ptr + t.to(tl.int64)[:, None] * O + n[None], a.to(dtype), stored)


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
    v: Tensor,
    late: bool,
    act: FusedActivation | None = None,
) -> None:
    """z [T, O] = x @ weight.T + bias and their adapters; fills act's result too. v, late: of
    launch_shrink()."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    count = len(x)
    band, width, columns, stages, warps, ahead = plan_small_m(count, outputs, act is not None)
    assert count <= width, "a program has all rows"
    _small_m_lora(
        (cdiv(outputs, band), 1, 1),
        (
            x, weight, bias, rows.slots, bank.b, bank.ranks, bank.bounds, bank.factor, bank.shift,
            v, z, None if act is None else act.out,
        ),
        (count,),
        (
            x.stride(0), inputs, outputs, len(bank.parts), bank.rank, bank.room,
            bias is not None, None if act is None else act.kind, width, band, columns,
            RANKS if act is None else RANKS // 2, stages, ahead, late,
            PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
