"""GEMV of one row with its adapter: norm, product, expand and activation in one launch.

    v = A y                             the launch before (few_rows.py)
    r = x + residual;  y = norm(r)      as in gemv.py, in every program
    z = W y + bias, then v B^T          B's part is on the way while W is read
    a = act(gate) * up

The base product has the bits of gemv.py; z is rounded before the adapter's part is added, as where
both are ops of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.lora_bank import LoraBank, LoraRows
from quire.kernels.gpu.elementwise.activations import activate
from quire.kernels.gpu.linear.gemv import (
    FusedActivation,
    FusedNorm,
    GemvPlan,
    dot_rows,
    load_normed_vector,
    load_vector,
    load_weight_rows,
    plan_gemv,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)

MAX_RANK = 64
"""Of a bank: a program has all ranks of B for its outputs in registers."""


MAX_REGISTERS = 128
"""Of a thread of eight warps, as gemv.py needs: with more a multiprocessor has one program."""


MAX_PROGRAMS = 2048
"""Of the product: fewer, that repeat more, wait less often for v."""


@triton.jit
def _outputs_part(n, bound_ptr, P: tl.constexpr):
    """The part of each output."""
    part = n * 0
    for p in tl.static_range(P - 1):
        part += (n >= tl.load(bound_ptr + p + 1)).to(tl.int32)
    return part


@triton.jit
def _load_b(b_ptr, slot, n, live, R: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr):
    """All ranks of B for outputs n: [R, BN]. What is beyond a part's rank is left out later."""
    r = tl.arange(0, R)
    at = b_ptr + (slot.to(tl.int64) * ROOM + r)[:, None] * WIDTH + n[None]
    return tl.load(at, live[None], 0.0)


@triton.jit
def _load_v(v_ptr, P: tl.constexpr, R: tl.constexpr):
    """v of each part: P times [R]."""
    vs = ()
    for p in tl.static_range(P):
        vs = vs + (tl.load(v_ptr + p * R + tl.arange(0, R)),)  # type: ignore[assignment]
    return vs


@triton.jit
def _add_delta(z, b, vs, part, rank, factor_ptr, shift_ptr, slot, n, live, P: tl.constexpr,
               R: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Outputs n with their adapter, rounded as z is. part, rank: of each output."""
    v = tl.broadcast_to(vs[0][:, None], b.shape)
    for p in tl.static_range(1, P):
        v = tl.where(part[None] == p, vs[p][:, None], v)
    r = tl.arange(0, R)
    sums = tl.sum(tl.where(r[:, None] < rank[None], b.to(tl.float32) * v, 0.0), 0)
    y = z.to(tl.float32)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + slot.to(tl.int64) * WIDTH + n, live, 0.0)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + slot.to(tl.int64) * WIDTH + n, live, 0.0)
    return tl.where(rank > 0, (y + sums).to(z.dtype), z)


@kernel("eps", "offset")
def _gemv_lora(
    x_ptr,  # [I]
    res_ptr,  # [I], read only if ADD
    norm_ptr,  # [I], read only if NORM
    w_ptr,  # [O, I], or [2 * O, I] if ACT
    bias_ptr,  # [O] or [2 * O], read only if BIAS
    slot_ptr,  # [1]
    b_ptr,  # [S, ROOM, O], or [S, ROOM, 2 * O] if ACT
    rank_ptr,  # [S, P]
    bound_ptr,  # [P + 1]
    factor_ptr,  # as a row of b for each slot, or None
    shift_ptr,  # as factor_ptr
    v_ptr,  # [P, R]
    z_ptr,  # [O] or [2 * O] out
    y_ptr,  # [I] out if NORM
    r_ptr,  # [I] out if ADD
    act_ptr,  # [O] out if ACT
    eps,
    offset,
    O: tl.constexpr,
    I: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # None, or a kind
    P: tl.constexpr,
    R: tl.constexpr,
    ROOM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TIMES: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,  # x is complete when this begins
    PDL: tl.constexpr,
):
    found = tl.load(slot_ptr)
    slot = tl.maximum(found, 0)
    first = tl.program_id(0) * (BN * TIMES)
    C: tl.constexpr = (I + BK - 1) // BK
    UP: tl.constexpr = O * I
    WIDTH: tl.constexpr = O if ACT is None else 2 * O
    LOADED: tl.constexpr = BN if TIMES > 1 else 0
    SIZE: tl.constexpr = (
        (BN * TIMES - LOADED) * I * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    )
    k = tl.arange(0, BK)
    n = first + tl.arange(0, BN)
    tiles = load_weight_rows(w_ptr, n, k, O, I, BK, C)
    if ACT is not None:
        ups = load_weight_rows(w_ptr + UP, n, k, O, I, BK, C)
    if NORM:
        norm = load_vector(norm_ptr, k, I, BK, C)
    b = _load_b(b_ptr, slot, n, n < O, R, ROOM, WIDTH)  # behind all that needs no slot
    if ACT is not None:
        up_b = _load_b(b_ptr, slot, O + n, n < O, R, ROOM, WIDTH)
    if PDL:
        if AHEAD and SIZE % 16 == 0 and first + BN * TIMES <= O:
            start = (first + LOADED).to(tl.int64) * I
            prefetch_l2(w_ptr + start, SIZE)
            if ACT is not None:
                prefetch_l2(w_ptr + UP + start, SIZE)
        launch_dependents()
        if not LATE:
            wait_for_previous_kernel()
    if not LATE:
        vs = _load_v(v_ptr, P, R)
    if NORM:
        xs = load_normed_vector(x_ptr, res_ptr, norm, y_ptr, r_ptr, k, eps, offset, I, BK, C, ADD)
    else:
        xs = load_vector(x_ptr, k, I, BK, C)
    dtype: tl.constexpr = z_ptr.dtype.element_ty
    for g in tl.static_range(TIMES):
        n = first + g * BN + tl.arange(0, BN)
        live = n < O
        if g + 1 < TIMES:  # in flight while this one is summed
            next_tiles = load_weight_rows(w_ptr, n + BN, k, O, I, BK, C)
            if ACT is not None:
                next_ups = load_weight_rows(w_ptr + UP, n + BN, k, O, I, BK, C)
            next_b = _load_b(b_ptr, slot, n + BN, n + BN < O, R, ROOM, WIDTH)
            if ACT is not None:
                next_up_b = _load_b(b_ptr, slot, O + n + BN, n + BN < O, R, ROOM, WIDTH)
        part = _outputs_part(n, bound_ptr, P if ACT is None else 1)
        rank = tl.where(found >= 0, tl.load(rank_ptr + slot * P + part), 0)
        z = dot_rows(tiles, xs, BN, BK, C, 1)
        if BIAS:
            z += tl.load(bias_ptr + n, live, 0.0).to(tl.float32)
        z = z.to(dtype)
        if LATE and g == 0:
            if PDL:
                wait_for_previous_kernel()
            vs = _load_v(v_ptr, P, R)
        z = _add_delta(z, b, vs, part, rank, factor_ptr, shift_ptr, slot, n, live,
                       P if ACT is None else 1, R, WIDTH)  # fmt: skip
        tl.store(z_ptr + n, z, live)
        if ACT is not None:
            up = dot_rows(ups, xs, BN, BK, C, 1)
            if BIAS:
                up += tl.load(bias_ptr + O + n, live, 0.0).to(tl.float32)
            up = up.to(dtype)
            rank = tl.where(found >= 0, tl.load(rank_ptr + slot * P + part + 1), 0)
            up = _add_delta(up, up_b, vs[1:], part, rank, factor_ptr, shift_ptr, slot, O + n,
                            live, 1, R, WIDTH)  # fmt: skip
            tl.store(z_ptr + O + n, up, live)
            a = activate(z.to(tl.float32), ACT) * up.to(tl.float32)
            tl.store(act_ptr + n, a.to(dtype), live)
        if g + 1 < TIMES:
            tiles, b = next_tiles, next_b
            if ACT is not None:
                ups, up_b = next_ups, next_up_b


def supports(bank: LoraBank) -> bool:
    """Whether the adapters of a row that gemv.py multiplies can be computed with it."""
    return bank.rank <= MAX_RANK and bank.rank & (bank.rank - 1) == 0


def launch(
    z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: LoraBank,
    rows: LoraRows,
    v: Tensor,
    late: bool,
    norm: FusedNorm | None = None,
    act: FusedActivation | None = None,
    memory_idle: bool = False,
    cut: GemvPlan | None = None,
) -> None:
    """z [1, O] = weight @ x and its adapter. As gemv.launch(). v, late: of launch_shrink()."""
    total, inputs = weight.shape
    outputs = total if act is None else total // 2
    found = cut or plan_gemv(outputs, inputs, act is not None)
    band, columns, times, warps, ahead = found
    while outputs > MAX_PROGRAMS * band * times:
        times *= 2
    parts, rank = len(bank.parts), bank.rank
    add = norm is not None and norm.residual is not None
    given: tuple[Tensor | None, ...] = (x, None, None)
    made: tuple[Tensor | None, ...] = (None, None)
    numbers = (0.0, 0.0)
    if norm is not None:
        given = (norm.x, norm.residual, norm.weight)
        made = (norm.y, norm.r if add else None)
        numbers = (norm.eps, norm.offset)
    _gemv_lora(
        (cdiv(outputs, band * times), 1, 1),
        (
            *given, weight, bias, rows.slots, bank.b, bank.ranks, bank.bounds, bank.factor,
            bank.shift, v, z, *made, None if act is None else act.out,
        ),
        numbers,
        (
            outputs, inputs, norm is not None, add, bias is not None,
            None if act is None else act.kind, parts, rank, bank.room, band, columns, times,
            ahead or (memory_idle and times > 1), late, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
        maxnreg=MAX_REGISTERS if warps == 8 else None,
    )  # fmt: skip
