"""FP8 small-M GEMM kernel: a few e4m3 rows times an e4m3 weight, each weight read once.

A program streams a band of rows of W through shared memory several stages deep, and multiplies it
by all rows of x at once. W is the left operand, so the few rows of x are its narrow side.
Where there are too few bands to keep all memory busy, each is split along the inputs, and the
program that finishes last adds the parts up, always in the same order.

Sums in float32, scaled at the end, or by blocks after each 128 inputs. gemv_bytes.py has one row;
fp8_linear.py has as many rows as fill a tile of the library's products.
Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8Weight
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import (
    PDL_ENABLED,
    launch_dependents,
    prefetch_l2,
    wait_for_previous_kernel,
)


class Fp8SmallMPlan(NamedTuple):
    """Split of a product: outputs of a program, inputs at once, stages, warps, parts."""

    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1
    prefetch: bool = False  # whether its band is prefetched to L2 before the rows are ready


@kernel("T", "xs_step")
def _fp8_small_m_gemm(
    q_ptr,  # [T, I] e4m3
    xs_ptr,  # [T], or [GROUPS, T] xs_step apart
    w_ptr,  # [O, I] e4m3
    ws_ptr,  # [O], or [O / 128, GROUPS]
    bias_ptr,  # [O], read only if HAS_BIAS
    y_ptr,  # [T, O] out
    part_ptr,  # [bands, PARTS, BN, TP] float32, written and read if PARTS > 1
    ticket_ptr,  # [bands] int32, zero before and after
    T,
    xs_step,
    I: tl.constexpr,
    O: tl.constexpr,
    GROUPS: tl.constexpr,  # ceil(I / 128)
    BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TP: tl.constexpr,  # power of two >= T, 16 at least
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    band, part = tl.program_id(0), tl.program_id(1)
    first = band * BN
    o, t, i = first + tl.arange(0, BN), tl.arange(0, TP), tl.arange(0, BK)
    o_live, t_live = o < O, t < T
    if PDL:
        if AHEAD and PARTS == 1 and (BN * I) % 16 == 0 and first + BN <= O:
            prefetch_l2(w_ptr + first.to(tl.int64) * I, BN * I)
        launch_dependents()
        wait_for_previous_kernel()
    w_at = w_ptr + tl.minimum(o, O - 1).to(tl.int64)[:, None] * I + i[None, :]
    q_at = q_ptr + tl.minimum(t, T - 1)[None, :] * I + i[:, None]
    acc = tl.zeros((BN, TP), tl.float32)
    EACH: tl.constexpr = (I + BK * PARTS - 1) // (BK * PARTS) * BK
    if BY_BLOCK:
        xs_at, ws_at = xs_ptr + t, ws_ptr + (o // 128) * GROUPS
        g = tl.minimum(part * (EACH // 128), GROUPS - 1)
        xs = tl.load(xs_at + g * xs_step, t_live, 0.0)
        ws = tl.load(ws_at + g, o_live, 0.0)
    for step in tl.range(0, EACH, BK, num_stages=STAGES):
        at = part * EACH + step
        if I % (BK * PARTS) == 0:
            w = tl.load(w_at + at, eviction_policy="evict_first")
            q = tl.load(q_at + at)
        else:
            w = tl.load(w_at + at, (at + i < I)[None, :], 0.0, eviction_policy="evict_first")
            q = tl.load(q_at + at, (at + i < I)[:, None], 0.0)
        if BY_BLOCK:  # BK is 128; the next scales load while these are used
            g = tl.minimum(at // 128 + 1, GROUPS - 1)
            next_xs = tl.load(xs_at + g * xs_step, t_live, 0.0)
            next_ws = tl.load(ws_at + g, o_live, 0.0)
            acc += tl.dot(w, q) * (ws[:, None] * xs[None, :])
            xs, ws = next_xs, next_ws
        else:
            acc += tl.dot(w, q)  # a matrix instruction's own sums lose bits; these do not
    if PARTS > 1:
        cell = tl.arange(0, BN)[:, None] * TP + t[None, :]
        parts = part_ptr + band * (PARTS * BN * TP) + cell
        tl.store(parts + part * (BN * TP), acc)
        tl.debug_barrier()  # all of the part is written before the counter is increased
        if tl.atomic_add(ticket_ptr + band, 1, sem="acq_rel") != PARTS - 1:
            return
        acc = tl.zeros((BN, TP), tl.float32)
        for p in tl.static_range(PARTS):
            acc += tl.load(parts + p * (BN * TP), cache_modifier=".cg")
        tl.store(ticket_ptr + band, 0)
    if not BY_BLOCK:
        acc *= tl.load(ws_ptr + o, o_live, 0.0)[:, None] * tl.load(xs_ptr + t, t_live, 0.0)[None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o, o_live, 0.0).to(tl.float32)[:, None]
    y_at = y_ptr + t[None, :] * O + o[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), o_live[:, None] & t_live[None, :])


def plan_fp8_small_m(rows: int, weight: Fp8Weight, exact: bool) -> Fp8SmallMPlan:
    """Bands of 64, the minimum of Hopper's matrix instruction, in parts where they are few.

    exact: less than that, since that instruction loses bits of its sums.
    """
    outputs, inputs = weight.shape
    if exact:
        return Fp8SmallMPlan(32, BLOCK_SIZE, 4, 4)
    bands = cdiv(outputs, 64)
    if bands >= 256:
        return Fp8SmallMPlan(128, BLOCK_SIZE, 5, 8)
    if weight.block_size:
        return Fp8SmallMPlan(64, BLOCK_SIZE, 6, 4, max(1, min(384 // bands, 4, inputs // 1024)))
    parts = max(1, min((256 if rows <= 32 else 128) // bands, 4, inputs // 1024))
    return Fp8SmallMPlan(64, 2 * BLOCK_SIZE, 4, 4, parts)


def small_m_product(
    y: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    cut: Fp8SmallMPlan | None = None,
) -> None:
    """y [T, O] from rows already quantized."""
    rows, (outputs, inputs) = q.shape[0], weight.shape
    wide, deep, stages, warps, parts, ahead = cut or plan_fp8_small_m(
        rows, weight, y.dtype == torch.float32
    )
    bands, tall = cdiv(outputs, wide), max(16, next_power_of_2(rows))
    tickets = weight.counters
    if tickets is None or bands > len(tickets):
        parts = 1
    sums = None
    if parts > 1:
        sums = torch.empty(bands * parts * wide * tall, dtype=torch.float32, device=y.device)
    _fp8_small_m_gemm(
        (bands, parts, 1),
        (q, scale, weight.data, weight.scale, bias, y, sums, tickets),
        (rows, scale.stride(0) if weight.block_size else 0),
        (
            inputs, outputs, cdiv(inputs, BLOCK_SIZE), bool(weight.block_size), bias is not None,
            tall, wide, deep, stages, parts, ahead, PDL_ENABLED,
        ),
        warps=warps,
        pdl=PDL_ENABLED,
    )  # fmt: skip
