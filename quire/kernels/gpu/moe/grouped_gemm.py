"""Grouped GEMM kernel: many rows, each times the weights of its own expert.

Rows are sorted by expert (moe_sort). A tile is BLOCK_M sorted rows of one expert; only the device
has the number of tiles, so the grid is the greatest possible, and a block finds its tile from the
experts' starts or returns. Tiles of one expert run side by side and share its weights in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.moe.moe_gate import apply_gate
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel
from quire.kernels.moe_experts import ExpertActivation


class GroupedGemmTile(NamedTuple):
    """Split of a product."""

    m: int
    n: int
    k: int
    group: int  # row tiles that take turns over one column tile, so that weights are read once
    warps: int
    stages: int


@triton.jit
def find_tile(start_ptr, N_TILES: tl.constexpr, X: tl.constexpr, X_PAD: tl.constexpr,
             BLOCK_M: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """(expert or -1, first row, end of the expert's rows, column tile) of this program."""
    pid = tl.program_id(0)
    inside = pid % (GROUP * N_TILES)
    tile = pid // (GROUP * N_TILES) * GROUP + inside % GROUP
    xs = tl.arange(0, X_PAD)
    start = tl.load(start_ptr + xs, xs < X, 0)
    end = tl.load(start_ptr + xs + 1, xs < X, 0)
    max_row_tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    max_row_tiles = tl.where(xs < X, max_row_tiles, 0)
    ends = tl.cumsum(max_row_tiles, 0)
    mine = (ends > tile) & (ends - max_row_tiles <= tile)
    expert = tl.sum(tl.where(mine, xs + 1, 0), 0) - 1
    row = tl.sum(tl.where(mine, start + (tile - ends + max_row_tiles) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(mine, end, 0), 0), inside // GROUP


@kernel()
def _gate_up(
    x_ptr,  # [T, E]
    order_ptr,  # [P]
    start_ptr,  # [X + 1]
    w_ptr,  # [X, 2F, E]
    bias_ptr,  # [X, 2F] or None
    h_ptr,  # [P, F] out, sorted
    X_T: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TOP: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    expert, row, end, n = find_tile(start_ptr, tl.cdiv(F, BLOCK_N), X, X_PAD, BLOCK_M, GROUP)
    if expert < 0:
        return
    rows = row + tl.arange(0, BLOCK_M)
    live = rows < end
    token = tl.load(order_ptr + rows, live, 0) // TOP
    fs = n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token.to(tl.int64)[:, None] * X_T + ks[None]
    PARTS: tl.constexpr = 1 if KIND == "relu2" else 2  # products: up alone, or gate and up
    at = expert.to(tl.int64) * (PARTS * F * E)  # X * 2F * E can pass 2**31
    gate_at = w_ptr + at + tl.minimum(fs, F - 1)[None] * E + ks[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, E, BLOCK_K):
        if E % BLOCK_K:
            inside = start + ks < E
            x = tl.load(x_at + start, inside[None], 0.0)
            g = tl.load(gate_at + start, inside[:, None], 0.0)
            u = tl.load(gate_at + start + (PARTS - 1) * F * E, inside[:, None], 0.0)
        else:
            x = tl.load(x_at + start)
            g = tl.load(gate_at + start)
            u = tl.load(gate_at + start + (PARTS - 1) * F * E)
        gate = tl.dot(x, g, gate, input_precision="ieee")
        if PARTS == 2:
            up = tl.dot(x, u, up, input_precision="ieee")
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * (PARTS * F) + tl.minimum(fs, F - 1)
        gate += tl.load(bias_at).to(tl.float32)[None]
        up += tl.load(bias_at + (PARTS - 1) * F).to(tl.float32)[None]
    h = apply_gate(gate, up, KIND, ALPHA, LIMIT).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + rows.to(tl.int64)[:, None] * F + fs[None], h, live[:, None] & (fs < F)[None])


@kernel()
def _down(
    h_ptr,  # [P, F] sorted
    order_ptr,  # [P]
    start_ptr,  # [X + 1]
    w_ptr,  # [X, E, F]
    bias_ptr,  # [X, E] or None
    y_ptr,  # [P, E] out, by pair
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    expert, row, end, n = find_tile(start_ptr, tl.cdiv(E, BLOCK_N), X, X_PAD, BLOCK_M, GROUP)
    if expert < 0:
        return
    rows = row + tl.arange(0, BLOCK_M)
    live = rows < end
    es = n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    h_at = h_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * F + ks[None]
    w_at = w_ptr + expert.to(tl.int64) * (E * F) + tl.minimum(es, E - 1)[None] * F + ks[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, F, BLOCK_K):
        if F % BLOCK_K:
            inside = start + ks < F
            h = tl.load(h_at + start, inside[None], 0.0)
            w = tl.load(w_at + start, inside[:, None], 0.0)
        else:
            h = tl.load(h_at + start)
            w = tl.load(w_at + start)
        sums = tl.dot(h, w, sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + expert * E + tl.minimum(es, E - 1)).to(tl.float32)[None]
    pair = tl.load(order_ptr + rows, live, 0).to(tl.int64)
    y_at = y_ptr + pair[:, None] * E + es[None]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), live[:, None] & (es < E)[None])


def max_row_tiles(pairs: int, experts: int, tile: GroupedGemmTile) -> int:
    """The most row tiles there can be, a multiple of the group."""
    most = min(pairs, pairs // tile.m + experts)
    return cdiv(most, tile.group) * tile.group


def gate_up(
    h: Tensor, x: Tensor, order: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None,
    gate: ExpertActivation, top: int, tile: GroupedGemmTile,
) -> None:  # fmt: skip
    """h [P, F] = gate(x of each sorted pair's token @ weight[its expert].T + bias)."""
    experts, width, size = weight.shape[0], h.shape[1], x.shape[1]
    grid = (max_row_tiles(len(h), experts, tile) * cdiv(width, tile.n), 1, 1)
    consts = (
        x.stride(0), size, width, experts, next_power_of_2(experts), top,
        gate.kind, gate.alpha, gate.limit, *tile[:4],
    )  # fmt: skip
    pdl = not _gate_up.interpreted
    tensors = (x, order, starts, weight, bias, h)
    _gate_up(grid, tensors, (), (*consts, pdl), tile.warps, tile.stages, pdl)


def down(
    y: Tensor, h: Tensor, order: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None,
    tile: GroupedGemmTile,
) -> None:  # fmt: skip
    """y[pair] = h [P, F] @ weight[the pair's expert].T + bias, for every sorted row."""
    experts, size, width = weight.shape
    grid = (max_row_tiles(len(h), experts, tile) * cdiv(size, tile.n), 1, 1)
    consts = (size, width, experts, next_power_of_2(experts), *tile[:4])
    pdl = not _down.interpreted
    tensors = (h, order, starts, weight, bias, y)
    _down(grid, tensors, (), (*consts, pdl), tile.warps, tile.stages, pdl)
