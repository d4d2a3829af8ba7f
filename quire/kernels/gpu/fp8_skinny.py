"""A few e4m3 rows times an e4m3 weight: the weights are what moves, and each is read once.

A program streams a band of rows of W through shared memory several stages deep, and multiplies it
by all rows of x at once. W stands left of the product, so the few rows of x are its narrow side.
The band is asked for from L2 before the kernel that quantizes x has ended.

Sums in float32, scaled at the end, or by blocks after each 128 inputs. Not here: one row
(gpu/gemv_fp8.py); as many rows as fill a tile of the library's products (gpu/fp8_linear.py).
Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8 import BLOCK, Fp8Weight
from quire.kernels.gpu.start import kernel
from quire.kernels.gpu.wait import let_go, prefetch, wait_for_forerunner


class Cut(NamedTuple):
    """How a product is cut: outputs of a program, inputs at once, stages, warps, rows in L2."""

    outputs: int
    inputs: int
    stages: int
    warps: int
    ahead: bool = True


@kernel("T", "xs_step")
def _skinny(
    q_ptr,  # [T, I] e4m3
    xs_ptr,  # [T], or [GROUPS, T] xs_step apart
    w_ptr,  # [O, I] e4m3
    ws_ptr,  # [O], or [O / 128, GROUPS]
    bias_ptr,  # [O], read only if HAS_BIAS
    y_ptr,  # [T, O] out
    T,
    xs_step,
    I: tl.constexpr,
    O: tl.constexpr,
    GROUPS: tl.constexpr,  # ceil(I / 128)
    BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TP: tl.constexpr,  # power of two >= T, 8 at least
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BN
    o, t, i = first + tl.arange(0, BN), tl.arange(0, TP), tl.arange(0, BK)
    o_live, t_live = o < O, t < T
    if PDL:
        if AHEAD and (BN * I) % 16 == 0 and first + BN <= O:
            prefetch(w_ptr + first.to(tl.int64) * I, BN * I)
        let_go()
        wait_for_forerunner()
    w_at = w_ptr + tl.minimum(o, O - 1).to(tl.int64)[:, None] * I + i[None, :]
    q_at = q_ptr + tl.minimum(t, T - 1)[None, :] * I + i[:, None]
    acc = tl.zeros((BN, TP), tl.float32)
    for at in tl.range(0, I, BK, num_stages=STAGES):
        if I % BK == 0:
            w = tl.load(w_at + at, eviction_policy="evict_first")
            q = tl.load(q_at + at)
        else:
            w = tl.load(w_at + at, (at + i < I)[None, :], 0.0, eviction_policy="evict_first")
            q = tl.load(q_at + at, (at + i < I)[:, None], 0.0)
        if BY_BLOCK:  # BK is 128
            g = at // 128
            xs = tl.load(xs_ptr + g * xs_step + t, t_live, 0.0)
            ws = tl.load(ws_ptr + (o // 128) * GROUPS + g, o_live, 0.0)
            acc += tl.dot(w, q) * (ws[:, None] * xs[None, :])
        else:
            acc = tl.dot(w, q, acc)
    if not BY_BLOCK:
        acc *= tl.load(ws_ptr + o, o_live, 0.0)[:, None] * tl.load(xs_ptr + t, t_live, 0.0)[None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o, o_live, 0.0).to(tl.float32)[:, None]
    y_at = y_ptr + t[None, :] * O + o[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), o_live[:, None] & t_live[None, :])


def cut_of(rows: int, weight: Fp8Weight) -> Cut:
    """Bands that give each multiprocessor one or two programs, each with a deep pipeline."""
    outputs = 16 if weight.shape[0] <= 4096 else 32
    return Cut(outputs, BLOCK if weight.block else 2 * BLOCK, 5, 4)


def product(
    y: Tensor,
    q: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    cut: Cut | None = None,
) -> None:
    """y [T, O] from rows already quantized."""
    rows, (outputs, inputs) = q.shape[0], weight.shape
    wide, deep, stages, warps, ahead = cut or cut_of(rows, weight)
    pdl = not _skinny.interpreted
    _skinny(
        (triton.cdiv(outputs, wide), 1, 1),
        (q, scale, weight.data, weight.scale, bias, y),
        (rows, scale.stride(0) if weight.block else 0),
        (
            inputs, outputs, triton.cdiv(inputs, BLOCK), bool(weight.block), bias is not None,
            max(8, triton.next_power_of_2(rows)), wide, deep, stages, ahead, pdl,
        ),
        warps=warps,
        pdl=pdl,
    )  # fmt: skip
