"""FP8 experts on the GPU: rows quantized once per token, sorted, multiplied, gated, multiplied.

    sort; quantize x; gate_up and gate; quantize h; down; weighted sum

As grouped_gemm, with the same tiles, but the products are scaled: by blocks after each 128 inputs,
by channels at the end. Few rows take the same path as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.fp8_weight import BLOCK_SIZE, Fp8ExpertWeights
from quire.kernels.gpu.linear import quantize_fp8
from quire.kernels.gpu.moe.grouped_gemm import GroupedGemmTile, find_tile, max_row_tiles
from quire.kernels.gpu.moe.moe_gate import apply_gate
from quire.kernels.gpu.moe.moe_sort import sort_by_expert
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.moe_experts import ExpertActivation


@triton.jit
def _multiply_step(q, w, acc, xs_ptr, row, ws_ptr, col, g, xs_step, GROUPS: tl.constexpr,
          BY_BLOCK: tl.constexpr):  # fmt: skip
    """acc + q @ w, scaled if by blocks. row, col: of the tile's rows and outputs."""
    if BY_BLOCK:
        xs = tl.load(xs_ptr + row + g * xs_step)
        ws = tl.load(ws_ptr + (col // 128) * GROUPS + g)
        return acc + tl.dot(q, w) * (xs[:, None] * ws[None, :])
    else:
        return tl.dot(q, w, acc)


@triton.jit
def _apply_scales(acc, xs_ptr, row, ws_ptr, col, BY_BLOCK: tl.constexpr):
    """A sum over all inputs, scaled if it is not yet."""
    if BY_BLOCK:
        return acc
    else:
        return acc * (tl.load(xs_ptr + row)[:, None] * tl.load(ws_ptr + col)[None, :])


@kernel("xs_step")
def _gate_up(
    q_ptr,  # [T, E] e4m3
    xs_ptr,  # [T], or [GROUPS, T] xs_step apart
    order_ptr,  # [P]
    start_ptr,  # [X + 1]
    w_ptr,  # [X, 2F, E] e4m3
    ws_ptr,  # [X, 2F], or [X, ceil(2F / 128), GROUPS]
    bias_ptr,  # [X, 2F] or None
    h_ptr,  # [P, F] out, sorted
    xs_step,
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    expert, row, end, n = find_tile(start_ptr, tl.cdiv(F, BLOCK_N), X, X_PAD, BLOCK_M, GROUP)
    if expert < 0:
        return
    rows = row + tl.arange(0, BLOCK_M)
    live = rows < end
    token = tl.load(order_ptr + rows, live, 0) // TOP
    fs = n * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.minimum(fs, F - 1)
    ks = tl.arange(0, 128)
    q_at = q_ptr + token.to(tl.int64)[:, None] * E + ks[None]
    first = expert.to(tl.int64) * (2 * F)  # X * 2F * E can pass 2**31
    gate_at = w_ptr + (first + col)[None] * E + ks[:, None]
    ws_at = ws_ptr + (expert * ((2 * F + 127) // 128) * GROUPS if BY_BLOCK else first)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(GROUPS):
        inside = g * 128 + ks < E
        q = tl.load(q_at + g * 128, inside[None], 0.0)
        w = tl.load(gate_at + g * 128, inside[:, None], 0.0)
        u = tl.load(gate_at + F * E + g * 128, inside[:, None], 0.0)
        gate = _multiply_step(q, w, gate, xs_ptr, token, ws_at, col, g, xs_step, GROUPS, BY_BLOCK)
        up = _multiply_step(q, u, up, xs_ptr, token, ws_at, F + col, g, xs_step, GROUPS, BY_BLOCK)
    gate = _apply_scales(gate, xs_ptr, token, ws_at, col, BY_BLOCK)
    up = _apply_scales(up, xs_ptr, token, ws_at, F + col, BY_BLOCK)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + first + col).to(tl.float32)[None]
        up += tl.load(bias_ptr + first + F + col).to(tl.float32)[None]
    h = apply_gate(gate, up, KIND, ALPHA, LIMIT).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + rows.to(tl.int64)[:, None] * F + fs[None], h, live[:, None] & (fs < F)[None])


@kernel("xs_step")
def _down(
    q_ptr,  # [P, F] e4m3, sorted
    xs_ptr,  # [P], or [GROUPS, P] xs_step apart
    order_ptr,  # [P]
    start_ptr,  # [X + 1]
    w_ptr,  # [X, E, F] e4m3
    ws_ptr,  # [X, E], or [X, ceil(E / 128), GROUPS]
    bias_ptr,  # [X, E] or None
    y_ptr,  # [P, E] out, by pair
    xs_step,
    E: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    expert, row, end, n = find_tile(start_ptr, tl.cdiv(E, BLOCK_N), X, X_PAD, BLOCK_M, GROUP)
    if expert < 0:
        return
    rows = row + tl.arange(0, BLOCK_M)
    live = rows < end
    known = tl.minimum(rows, end - 1)
    es = n * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.minimum(es, E - 1)
    ks = tl.arange(0, 128)
    q_at = q_ptr + known.to(tl.int64)[:, None] * F + ks[None]
    first = expert.to(tl.int64) * E  # X * E * F can pass 2**31
    w_at = w_ptr + (first + col)[None] * F + ks[:, None]
    ws_at = ws_ptr + (expert * ((E + 127) // 128) * GROUPS if BY_BLOCK else first)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(GROUPS):
        inside = g * 128 + ks < F
        q = tl.load(q_at + g * 128, inside[None], 0.0)
        w = tl.load(w_at + g * 128, inside[:, None], 0.0)
        sums = _multiply_step(q, w, sums, xs_ptr, known, ws_at, col, g, xs_step, GROUPS, BY_BLOCK)
    sums = _apply_scales(sums, xs_ptr, known, ws_at, col, BY_BLOCK)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + first + col).to(tl.float32)[None]
    pair = tl.load(order_ptr + rows, live, 0).to(tl.int64)
    y_at = y_ptr + pair[:, None] * E + es[None]
    tl.store(y_at, sums.to(y_ptr.dtype.element_ty), live[:, None] & (es < E)[None])


def supports(x: Tensor, gate_up: Fp8ExpertWeights, down: Fp8ExpertWeights) -> bool:
    """Whether these kernels support the op: both banks alike, rows that fit a program."""
    if (
        not isinstance(down, Fp8ExpertWeights)
        or gate_up.block_size != down.block_size
        or x.stride(1) != 1
    ):
        return False
    return max(down.shape[1:]) <= quantize_fp8.MAX_INPUTS


def expert_outputs(
    x: Tensor,
    ids: Tensor,
    gate_up: Fp8ExpertWeights,
    down: Fp8ExpertWeights,
    gate: ExpertActivation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The output of each pair's expert, unweighted: [P, E]."""
    (tokens, top), (experts, size, width) = ids.shape, down.shape
    order, starts = sort_by_expert(ids, experts)
    tile = fp8_grouped_tile(tokens * top, experts, x.dtype == torch.float32)
    padded = next_power_of_2(experts)
    h = x.new_empty((tokens * top, width))
    y = x.new_empty((tokens * top, size))
    for out, rows, bank, bias in ((h, x, gate_up, gate_up_bias), (y, h, down, down_bias)):
        q, scale = quantize_fp8.outputs(rows, bank.block_size, bank.input_scale)
        quantize_fp8.launch((q, scale), rows, bank.block_size, bank.input_scale)
        groups, step = cdiv(rows.shape[1], BLOCK_SIZE), scale.stride(0) if bank.block_size else 0
        consts = (size, width, experts, padded, groups, bool(bank.block_size))
        gating = (top, gate.kind, gate.alpha, gate.limit) if out is h else ()
        grid = (max_row_tiles(len(h), experts, tile) * cdiv(out.shape[1], tile.n), 1, 1)
        tensors = (q, scale, order, starts, bank.data, bank.scale, bias, out)
        body = _gate_up if out is h else _down
        body(grid, tensors, (step,), (*consts, *gating, tile.m, tile.n, tile.group),
             tile.warps, tile.stages)  # fmt: skip
    return y


def multiply_sorted(
    y: Tensor, x: Tensor, order: Tensor, starts: Tensor, bank: Fp8ExpertWeights,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """y[pair] = x [P, I], sorted by expert, @ bank[its expert].T + bias."""
    experts, outputs, inputs = bank.shape
    tile = fp8_grouped_tile(len(x), experts, x.dtype == torch.float32)
    q, scale = quantize_fp8.outputs(x, bank.block_size, bank.input_scale)
    quantize_fp8.launch((q, scale), x, bank.block_size, bank.input_scale)
    by_block = bool(bank.block_size)
    _down(
        (max_row_tiles(len(x), experts, tile) * cdiv(outputs, tile.n), 1, 1),
        (q, scale, order, starts, bank.data, bank.scale, bias, y),
        (scale.stride(0) if by_block else 0,),
        (
            outputs, inputs, experts, next_power_of_2(experts), cdiv(inputs, BLOCK_SIZE), by_block,
            tile.m, tile.n, tile.group,
        ),
        tile.warps,
        tile.stages,
    )  # fmt: skip


def fp8_grouped_tile(pairs: int, experts: int, exact: bool) -> GroupedGemmTile:
    """Rows as many as an expert has on average; two accumulators of 128 x 64 fill the registers.

    exact: too low for Hopper's matrix instruction, which loses bits of its sums.
    """
    rows = pairs / experts
    if rows <= 16 or exact:
        return GroupedGemmTile(16, 64, 128, 8, 4, 4)
    if rows <= 96:
        return GroupedGemmTile(64, 64, 128, 8, 4, 4)
    return GroupedGemmTile(128, 64, 128, 8, 8, 4)
