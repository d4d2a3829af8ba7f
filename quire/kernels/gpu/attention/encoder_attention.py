"""Encoder attention kernel: every token of a packed source attends to all of it.

A program holds a tile of query tokens of one source times all query heads of one KV head, and reads
keys and values from the projection's output. A tile is found by the sources' starts, so the host
needs only their number and the number of tokens.

Axes: T tokens of all sources, S sources, K kv heads, G query heads of one KV head, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.online_softmax import (
    LOWEST_SCORE,
    add_distance_bias,
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
) -> None:
    """Start the kernel."""
    tokens, heads, size = q.shape
    kv_heads, sources = k.shape[1], starts.shape[0] - 1
    group, padded = heads // kv_heads, max(16, next_power_of_2(size))
    wide = padded > 64 or q.dtype == torch.float32
    rows = max(32 if wide else 64, next_power_of_2(group))
    queries = rows // group
    reach = 0 if position_bias is None else position_bias.shape[1] // 2
    _encoder_attention(
        ((tokens // queries + sources) * kv_heads, 1, 1),
        (q, k, v, starts, out, position_bias),
        (scale, sources),
        (
            kv_heads, group, size, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), rows, queries, padded, 32 if wide else 64, reach,
            q.dtype == torch.float32,
        ),
        warps=4,
    )  # fmt: skip


@kernel("scale", "sources")
def _encoder_attention(
    q_ptr,  # [T, K * G, D]
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    starts_ptr,  # [S + 1]
    out_ptr,  # [T, K * G, D]
    bias_ptr,  # [K * G, 2 * REACH + 1] fp32, if REACH
    scale,
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
    REACH: tl.constexpr,
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
    n = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    query = lowest + m // G
    head = kh * G + m % G
    live = (m < QUERIES * G) & (query < length)
    real = live[:, None] & (d < D)[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0)
    bias = m
    if REACH:
        bias = bias_rows(bias_ptr, head, m < QUERIES * G, REACH)
    acc = tl.zeros([M, DP], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], LOWEST_SCORE, tl.float32)
    for low in tl.range(0, length, TILE, num_stages=2):
        at = low + n
        mask = (at < length)[:, None] & (d < D)[None, :]
        key = (begin + at).to(tl.int64)[:, None]
        k = tl.load(k_ptr + key * K_T + kh * K_H + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + key * V_T + kh * V_H + d[None, :], mask=mask, other=0.0)
        scores = scale_and_softcap(dot_qk(q, k, IEEE), scale, 0.0, False)
        if REACH:
            scores = add_distance_bias(scores, at[None, :] - query[:, None], bias, REACH)
        scores = tl.where((at < length)[None, :], scores, float("-inf"))
        acc, total, top = online_softmax_step(scores, v, acc, total, top, IEEE)
    where = out_ptr + (token * (K * G) + head[:, None]) * D + d[None, :]
    tl.store(where, normalize(acc, total).to(out_ptr.dtype.element_ty), mask=real)
