"""Encoder attention kernel: every token of a packed source attends to all of it, or to a window.

A program holds a tile of query tokens of one source times all query heads of one KV head, and reads
keys and values from the projection's output. A tile is found by the sources' starts, so the host
needs only their number and the number of tokens. Only the last keys of a source need a mask.

Axes: T tokens of all sources, S sources, K kv heads, G query heads of one KV head, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.online_softmax import (
    LOG2E,
    add_distance_bias,
    begin_sums,
    bias_rows,
    dot_qk,
    normalize,
    online_softmax_step,
    scale_and_softcap,
)
from quire.kernels.gpu.attention.paged_attention_prefill import sequence_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

_MAX_SIZE, _MAX_GROUP = 256, 64
SHORT_SOURCE = 64
"""Tokens of a step's longest source up to which tiles are small: large ones would be half empty."""


class EncoderTiles(NamedTuple):
    """A launch: rows (query tokens times heads), keys per iteration, launch options."""

    rows: int
    tile_keys: int
    warps: int
    stages: int


def plan_tiles(q: Tensor, kv_heads: int, longest: int) -> EncoderTiles:
    """Sizes for sources of at most `longest` tokens.

    The keys of an iteration depend on the model alone: they decide in what order a row is summed.
    """
    group, size = q.shape[1] // kv_heads, max(16, next_power_of_2(q.shape[2]))
    least = next_power_of_2(group)
    if q.dtype == torch.float32:
        return EncoderTiles(max(32, least), 32, 4, 1)
    if size > 128:
        return EncoderTiles(max(64, least), 32, 4, 2)
    if longest <= SHORT_SOURCE:
        return EncoderTiles(max(64, least), 64, 4, 1)
    return EncoderTiles(max(128, least), 64, 8 if size == 128 else 4, 3)


def outputs(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: Any, **__: Any) -> Tensor:
    """A new [T, H, D]. NotImplemented for layouts the kernel does not read."""
    packed = q.stride(2) == k.stride(2) == v.stride(2) == 1
    if not packed or q.shape[2] > _MAX_SIZE or q.shape[1] > _MAX_GROUP * k.shape[1]:
        return NotImplemented
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    position_bias: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    key_counts: Tensor | None = None,
) -> None:
    """Start the kernel."""
    tokens, heads, size = q.shape
    kv_heads, sources = k.shape[1], starts.shape[0] - 1
    group, tiles = heads // kv_heads, plan_tiles(q, kv_heads, longest)
    queries = tiles.rows // group
    reach = 0 if position_bias is None else position_bias.shape[1] // 2
    _encoder_attention(
        ((tokens // queries + sources) * kv_heads, 1, 1),
        (q, k, v, starts, out, position_bias, alibi, key_counts),
        (scale, softcap or 0.0, window or 0, sources),
        (
            kv_heads, group, size, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), tiles.rows, queries, max(16, next_power_of_2(size)),
            tiles.tile_keys, tiles.stages, reach, window is not None, softcap is not None,
            alibi is not None, key_counts is not None, q.dtype == torch.float32,
        ),
        warps=tiles.warps,
        stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _attend_keys(
    acc, total, top, q, query, low, high, length, begin, k_ptr, v_ptr, bias, slope, scale,
    softcap, window,
    D: tl.constexpr, K_T: tl.constexpr, V_T: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Absorb the keys [low, high) of a source. MASK: some are past its end or out of the window."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + n
        mask = (d < D)[None, :]
        if MASK:  # the next source's values must not be used: 0 * NaN is NaN
            mask = mask & (at < length)[:, None]
        key = (begin + at).to(tl.int64)[:, None]
        k = tl.load(k_ptr + key * K_T + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + key * V_T + d[None, :], mask=mask, other=0.0)
        scores = scale_and_softcap(dot_qk(q, k, at, False, IEEE), scale, softcap, SOFTCAP)
        ahead = at[None, :] - query[:, None]
        if ALIBI:
            scores -= slope[:, None] * tl.abs(ahead).to(tl.float32)
        if REACH:
            scores = add_distance_bias(scores, ahead, bias, REACH)
        if MASK:
            seen = (at < length)[None, :]
            if WINDOW:
                seen = seen & (tl.abs(ahead) < window)
            scores = tl.where(seen, scores, float("-inf"))
        acc, total, top = online_softmax_step(scores, v, at, acc, total, top, False, IEEE)
    return acc, total, top


@kernel("scale", "softcap", "window", "sources")
def _encoder_attention(
    q_ptr,  # [T, K * G, D]
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    starts_ptr,  # [S + 1]
    out_ptr,  # [T, K * G, D]
    bias_ptr,  # [K * G, 2 * REACH + 1] fp32, if REACH
    alibi_ptr,  # [K * G] fp32, if ALIBI
    key_counts_ptr,  # [S], if KEY_COUNTS
    scale,
    softcap,
    window,
    sources,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    M: tl.constexpr,  # rows of a tile: query tokens times G
    QUERIES: tl.constexpr,  # M // G
    DP: tl.constexpr,
    TILE: tl.constexpr,  # keys per iteration
    STAGES: tl.constexpr,
    REACH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    KEY_COUNTS: tl.constexpr,
    IEEE: tl.constexpr,
):
    kh = tl.program_id(0) % K
    tile = tl.program_id(0) // K
    s, first_tile = sequence_of(starts_ptr, 0, sources, tile, QUERIES)
    begin = tl.load(starts_ptr + s)
    length = tl.load(starts_ptr + s + 1) - begin
    lowest = (tile - first_tile) * QUERIES
    if lowest >= length:
        return
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    query = lowest + m // G
    head = kh * G + m % G
    real = ((m < QUERIES * G) & (query < length))[:, None] & (d < D)[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0)
    slope = tl.zeros([M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=m < QUERIES * G, other=0.0) * LOG2E
    bias = m
    if REACH:
        bias = bias_rows(bias_ptr, head, m < QUERIES * G, REACH)
    acc, total, top = begin_sums(M, DP)
    k_ptr += kh * K_H
    v_ptr += kh * V_H
    keys = length
    if KEY_COUNTS:
        count = tl.load(key_counts_ptr + s)
        keys = tl.where(count > 0, count, length)
    full = keys // TILE * TILE  # keys before it need no mask
    end = keys
    if WINDOW:
        full = tl.maximum(lowest - window + 1, 0) // TILE * TILE
        end = tl.minimum(keys, lowest + QUERIES + window - 1)
    else:
        acc, total, top = _attend_keys(
            acc, total, top, q, query, 0, full, keys, begin, k_ptr, v_ptr, bias, slope, scale,
            softcap, window,
            D, K_T, V_T, DP, TILE, STAGES, REACH, WINDOW, SOFTCAP, ALIBI, False, IEEE,
        )  # fmt: skip
    acc, total, top = _attend_keys(
        acc, total, top, q, query, full, end, keys, begin, k_ptr, v_ptr, bias, slope, scale,
        softcap, window,
        D, K_T, V_T, DP, TILE, STAGES, REACH, WINDOW, SOFTCAP, ALIBI, True, IEEE,
    )  # fmt: skip
    where = out_ptr + (token * (K * G) + head[:, None]) * D + d[None, :]
    tl.store(where, normalize(acc, total).to(out_ptr.dtype.element_ty), mask=real)
