"""Attention to a slice of the keys on the GPU: ranges of a context, as in paged_attention_decode,
then a merge that keeps the sum of the exponentials.

Axes: S queries, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.gpu.attention.kv_codes import CodeLayout
from quire.kernels.gpu.attention.online_softmax import (
    LOWEST_SCORE,
    begin_sums,
)
from quire.kernels.gpu.attention.paged_attention_decode import (
    attend_range,
    find_program,
    split_range,
)
from quire.kernels.gpu.attention.paged_attention_merge import merge_parts
from quire.kernels.gpu.attention.split_plan import AttentionExtras, plan_decode
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

_MAX_SIZE, _MAX_GROUP = 256, 128


@kernel("scale", "softcap", "v_scale", "window", "splits")
def slice_kernel(
    q_ptr,  # [S, K * G, D]
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table, if HAS_ROWS
    contexts_ptr,  # [S]
    part_ptr,  # [S, K, splits, G, D] fp32
    stats_ptr,  # [S, K, splits, 2, G] fp32: maximum, sum
    scale,  # of the scores, the keys' own scale in it
    softcap,
    v_scale,
    window,
    splits,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    HEAD: tl.constexpr,
    S_N: tl.constexpr,
    S_H: tl.constexpr,
    S_T: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    W: tl.constexpr,  # of a row of the table
    GP: tl.constexpr,  # power of two >= max(G, 16)
    DP: tl.constexpr,  # power of two >= max(D, 16)
    TILE: tl.constexpr,  # keys a turn
    CHUNK: tl.constexpr,  # keys in a range, at least
    STAGES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IEEE: tl.constexpr,
):
    kh, s, split, _ = find_program(splits, K)
    context = tl.load(contexts_ptr + s)
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    first, start, stop, used = split_range(
        context, window, split, splits, CHUNK, TILE, True, WINDOW
    )
    if split >= used:
        return
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    real = (g < G)[:, None] & (d < D)[None, :]
    head = kh * G + g
    q = tl.load(
        q_ptr + s.to(tl.int64) * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0
    )
    none = tl.zeros([GP], tl.float32)
    acc, total, top = begin_sums(GP, DP)
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, scales_ptr, tables_ptr + row.to(tl.int64) * W, kh, first,
        start, stop, context - 1, none, none, scale, softcap, K, D, B, HEAD, S_N, S_H, S_T, SCALES,
        DP, TILE, STAGES, SOFTCAP, False, 0, IEEE,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    mine = (s.to(tl.int64) * K + kh) * splits + split
    tl.store(part_ptr + mine * (G * D) + g[:, None] * D + d[None, :], acc, mask=real)
    tl.store(stats_ptr + mine * (2 * G) + g, top, mask=g < G)
    tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=g < G)


@kernel("window", "splits")
def merge_slice_kernel(
    part_ptr,  # [S, K, splits, G, D] fp32
    stats_ptr,  # [S, K, splits, 2, G] fp32
    contexts_ptr,  # [S]
    out_ptr,  # [K * G, S, D + 1] fp32
    window,
    splits,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GP: tl.constexpr,  # power of two >= G
    DP: tl.constexpr,  # power of two >= max(D, 16)
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Store one sequence's result of the heads of one KV head."""
    kh = tl.program_id(0)
    s = tl.program_id(1)
    context = tl.load(contexts_ptr + s)
    _, _, _, used = split_range(context, window, 0, splits, CHUNK, TILE, True, WINDOW)
    place = s.to(tl.int64) * K + kh
    acc, total, top = merge_parts(part_ptr, stats_ptr, place * splits, used, G, D, GP, DP)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    some = total > 0
    y = acc / tl.where(some, total, 1.0)[:, None]
    sums = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), LOWEST_SCORE)
    where = ((kh * G + g).to(tl.int64) * tl.num_programs(1) + s) * (D + 1)
    tl.store(out_ptr + where[:, None] + d[None, :], y, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(out_ptr + where + D, sums, mask=g < G)


def outputs(q: Tensor, cache: Tensor, tables: Tensor, *_: Any, **__: Any) -> Tensor:
    """A new [H, S, D + 1]. NotImplemented for layouts the kernels do not read."""
    sequences, heads, size = q.shape
    strided = has_dense_heads(cache) and tables.stride(-1) == 1 and q.stride(2) == 1
    if not strided or size > _MAX_SIZE or heads > _MAX_GROUP * cache.shape[2]:
        return NotImplemented
    return torch.empty((heads, sequences, size + 1), dtype=torch.float32, device=q.device)


def launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: Tensor | None = None,
    max_context: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    scales: Tensor | None = None,
) -> None:
    extras = AttentionExtras(
        scale, window, softcap, rows=rows, max_context=max_context, k_scale=k_scale,
        v_scale=v_scale, scales=scales,
    ).device(cache)  # fmt: skip
    sequences, heads, size = q.shape
    kv_heads, block = cache.shape[2:4]
    group, padded = heads // kv_heads, max(16, next_power_of_2(size))
    cut = plan_decode(q, cache, tables, sequences, extras)
    cells = sequences * heads * cut.splits
    part = torch.empty(cells * size, dtype=torch.float32, device=q.device)
    stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
    numbers = (extras.window or 0, cut.splits)
    slice_kernel(
        (sequences * kv_heads * cut.splits, 1, 1),
        (q, cache, extras.scales, tables, rows, contexts, part, stats),
        (extras.scale * extras.k_scale, softcap or 0.0, extras.v_scale, *numbers),
        (
            kv_heads, group, size, block, *CodeLayout.of(cache, extras.scales),
            q.stride(0), q.stride(1), tables.stride(0), max(16, next_power_of_2(group)), padded,
            cut.tile_keys, cut.min_chunk, cut.stages, rows is not None, window is not None,
            softcap is not None, q.dtype == torch.float32,
        ),
        warps=cut.warps,
    )  # fmt: skip
    merge_slice_kernel(
        (kv_heads, sequences, 1),
        (part, stats, contexts, out),
        numbers,
        (
            kv_heads, group, size, next_power_of_2(group), padded, cut.tile_keys, cut.min_chunk,
            window is not None,
        ),
        warps=4,
    )  # fmt: skip
