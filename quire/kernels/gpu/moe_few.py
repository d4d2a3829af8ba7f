"""Experts for a few rows: matrix-vector products that read the chosen experts' weights only.

    up      block (f, pair)    some rows of gate and up of one pair's expert -> h [P, F]
    down    block (e, t)       some outputs of one token, over all its experts, weighted

A pair is a token and one of its experts. The bound is memory, so each block has its loads in
flight at once; `down` knows the experts before `up` has ended and fetches their weights meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.moe_gate import gated
from quire.kernels.gpu.start import kernel
from quire.kernels.moe_experts import Gate


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
    TOP: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    fs = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(id_ptr + pair).to(tl.int64)  # X * 2F * E can pass 2**31
    row = tl.minimum(fs, F - 1)
    gate_at = w_ptr + (expert * 2 * F + row)[:, None] * E
    gate = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    up = tl.zeros((BLOCK_F, BLOCK_E), tl.float32)
    for start in tl.static_range(0, E, BLOCK_E):
        es = start + tl.arange(0, BLOCK_E)
        inside = es < E
        x = tl.load(x_ptr + (pair // TOP) * X_T + es, inside, 0.0).to(tl.float32)[None]
        gate += tl.load(gate_at + es[None], inside[None], 0.0).to(tl.float32) * x
        up += tl.load(gate_at + F * E + es[None], inside[None], 0.0).to(tl.float32) * x
    gates, ups = tl.sum(gate, 1), tl.sum(up, 1)
    if bias_ptr is not None:
        gates += tl.load(bias_ptr + expert * 2 * F + row).to(tl.float32)
        ups += tl.load(bias_ptr + expert * 2 * F + F + row).to(tl.float32)
    h = gated(gates, ups, KIND, ALPHA, LIMIT)
    tl.store(h_ptr + pair * F + fs, h.to(h_ptr.dtype.element_ty), fs < F)


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
    PDL: tl.constexpr,
):
    t = tl.program_id(1)
    es = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.minimum(es, E - 1)
    fs = tl.arange(0, BLOCK_F)
    CHUNKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    ahead = ()
    for c in tl.static_range(AHEAD):
        expert = tl.load(id_ptr + t * TOP + c // CHUNKS).to(tl.int64)  # X * E * F can pass 2**31
        f = (c % CHUNKS) * BLOCK_F + fs
        w_at = w_ptr + (expert * E + row)[:, None] * F + f[None]
        ahead = ahead + (tl.load(w_at, (f < F)[None], 0.0),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    y = tl.zeros((BLOCK_E,), tl.float32)
    for c in tl.static_range(TOP * CHUNKS):
        pair = t * TOP + c // CHUNKS
        f = (c % CHUNKS) * BLOCK_F + fs
        weight = tl.load(weight_ptr + pair)
        h = tl.load(h_ptr + pair * F + f, f < F, 0.0).to(tl.float32) * weight
        if c < AHEAD:
            w = ahead[c]  # type: ignore[var-annotated]
        else:
            expert = tl.load(id_ptr + pair).to(tl.int64)
            w = tl.load(w_ptr + (expert * E + row)[:, None] * F + f[None], (f < F)[None], 0.0)
        sums += w.to(tl.float32) * h[None]
        if bias_ptr is not None and c % CHUNKS == 0:
            expert = tl.load(id_ptr + pair).to(tl.int64)
            y += weight * tl.load(bias_ptr + expert * E + row).to(tl.float32)
    y += tl.sum(sums, 1)
    tl.store(y_ptr + t * E + es, y.to(y_ptr.dtype.element_ty), es < E)


def chunk_of(width: int) -> int:
    """A power of two that divides the width if one of a useful size does."""
    whole = width & -width
    return min(max(whole, 256), 1024, triton.next_power_of_2(width))


class Cut(NamedTuple):
    """How the two products are cut: rows of the weight in a block, columns at once, warps."""

    up: tuple[int, int, int] = (4, 1024, 4)
    down: tuple[int, int, int] = (4, 1024, 4)
    ahead: int = 3072  # columns of the second weight fetched before the first product has ended


CUT = Cut()


def few(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    cut: Cut = CUT,
) -> None:
    """moe_experts over few rows. cut: another than the usual, for tuning."""
    (tokens, top), (size, width) = ids.shape, down.shape[1:]
    h = x.new_empty((tokens * top, width))
    pdl = not _up.interpreted
    rows, most, warps = cut.up
    shape = (x.stride(0), size, width, top, gate.kind, gate.alpha, gate.limit)
    consts = (*shape, rows, min(triton.next_power_of_2(size), most), pdl)
    grid = (triton.cdiv(width, rows), tokens * top, 1)
    _up(grid, (x, ids, gate_up, gate_up_bias, h), (), consts, warps, pdl=pdl)
    rows, most, warps = cut.down
    wide = min(chunk_of(width), most)
    ahead = min(top * triton.cdiv(width, wide), cut.ahead // wide)
    grid = (triton.cdiv(size, rows), tokens, 1)
    tensors = (h, ids, weights, down, down_bias, out)
    _down(grid, tensors, (), (size, width, top, rows, wide, ahead, pdl), warps, pdl=pdl)
