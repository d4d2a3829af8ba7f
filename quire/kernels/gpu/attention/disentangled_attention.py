"""Disentangled attention kernel: the terms of positions are products of matrices, made before it.

A program holds a tile of query tokens of one source and one head. For each tile of keys it looks up
what the two products have for the distance of query and key.

Axes: T tokens of all sources, S sources, H heads, D head size, P vectors of positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.online_softmax import (
    LOG2E,
    begin_sums,
    dot_qk,
    normalize,
    online_softmax_step,
)
from quire.kernels.gpu.attention.paged_attention_prefill import sequence_of
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

_MAX_SIZE = 128
ROWS, KEYS = 64, 32


def outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """A new [T, H, D]. NotImplemented for layouts the kernel does not read."""
    if not q.stride(2) == k.stride(2) == v.stride(2) == 1 or q.shape[2] > _MAX_SIZE:
        return NotImplemented
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    buckets: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
) -> None:
    """Start the kernels."""
    tokens, heads, size = q.shape
    sources = starts.shape[0] - 1
    by_query, by_key = _products(q, position_keys), _products(k, position_queries)
    given = next((one for one in (by_query, by_key) if one is not None), None)
    rows = ROWS if q.dtype != torch.float32 else ROWS // 2
    _disentangled_attention(
        ((tokens // rows + sources) * heads, 1, 1),
        (q, k, v, by_query, by_key, buckets, starts, out),
        (scale, sources, tokens, buckets.shape[0] // 2),
        (
            heads, size, 0 if given is None else given.shape[2], q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), rows,
            max(16, next_power_of_2(size)), KEYS, by_query is not None, by_key is not None,
            q.dtype == torch.float32,
        ),
        warps=4,
        stages=1 if q.dtype == torch.float32 else 2,
    )  # fmt: skip


def _products(x: Tensor, positions: Tensor | None) -> Tensor | None:
    """x [T, H, D] times positions [P, H, D] -> [H, T, P]."""
    return None if positions is None else torch.bmm(x.transpose(0, 1), positions.permute(1, 2, 0))


@kernel("scale", "sources", "tokens", "reach")
def _disentangled_attention(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, H, D]
    v_ptr,  # [T, H, D]
    by_query_ptr,  # [H, T, P], if BY_QUERY
    by_key_ptr,  # [H, T, P], if BY_KEY
    buckets_ptr,  # [2 reach + 1]
    starts_ptr,  # [S + 1]
    out_ptr,  # [T, H, D]
    scale,
    sources,
    tokens,
    reach,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    K_T: tl.constexpr,
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    M: tl.constexpr,  # query tokens of a tile
    DP: tl.constexpr,
    TILE: tl.constexpr,  # keys per iteration
    BY_QUERY: tl.constexpr,
    BY_KEY: tl.constexpr,
    IEEE: tl.constexpr,
):
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H
    s, first_tile = sequence_of(starts_ptr, 0, sources, tile, M)
    begin = tl.load(starts_ptr + s)
    length = tl.load(starts_ptr + s + 1) - begin
    lowest = (tile - first_tile) * M
    if lowest >= length:
        return
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    query = lowest + tl.arange(0, M)
    live = query < length
    real = live[:, None] & (d < D)[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * Q_T + head * Q_H + d[None, :], mask=real, other=0.0)
    acc, total, top = begin_sums(M, DP)
    row = head.to(tl.int64) * tokens + begin  # of the source's first token in the products
    for start in range(0, length, TILE):
        at = start + n
        seen = (at < length)[None, :]
        mask = (at < length)[:, None] & (d < D)[None, :]
        key = (begin + at).to(tl.int64)[:, None]
        k = tl.load(k_ptr + key * K_T + head * K_H + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + key * V_T + head * V_H + d[None, :], mask=mask, other=0.0)
        scores = dot_qk(q, k, at, False, IEEE)
        both = live[:, None] & seen
        distance = query[:, None] - at[None, :]
        place = tl.load(buckets_ptr + reach + distance, mask=both, other=0)
        if BY_QUERY:
            where = (row + query)[:, None] * P + place
            scores += tl.load(by_query_ptr + where, mask=both, other=0.0).to(tl.float32)
        if BY_KEY:
            where = (row + at)[None, :] * P + place
            scores += tl.load(by_key_ptr + where, mask=both, other=0.0).to(tl.float32)
        scores = tl.where(seen, scores * (scale * LOG2E), float("-inf"))
        acc, total, top = online_softmax_step(scores, v, at, acc, total, top, False, IEEE)
    where = out_ptr + (token * H + head) * D + d[None, :]
    tl.store(where, normalize(acc, total).to(out_ptr.dtype.element_ty), mask=real)
