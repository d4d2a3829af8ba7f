"""Attention of one query token a sequence: split along the context, one launch.

A program holds all query heads of one KV head of one sequence, so each key and value is read once.
It takes a stretch of the sequence's own context; how long is decided here, from the context, so a
captured graph serves every length. The last program of a sequence's KV head to finish merges.

The length of a stretch depends on the context and on SPLITS, nothing else of the batch. The merge
goes in the order of the stretches: the result does not depend on which program came last.

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.paged_attention_merge import merge
from quire.kernels.gpu.paged_attention_scores import (
    LOG2E,
    LOWEST,
    absorb,
    bent,
    join_sink,
    product,
    settled,
)
from quire.kernels.gpu.start import kernel


@kernel("scale", "softcap", "v_scale", "window", "splits")
def decode_kernel(
    q_ptr,  # [S, K * G, D]
    cache_ptr,  # [N, 2, K, B, D]
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table, if HAS_ROWS
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,  # [S, K, splits, G, D] fp32, if SPLIT
    stats_ptr,  # [S, K, splits, 2, G] fp32: maximum, sum
    done_ptr,  # [S * K] int32, zeros before and after
    sinks_ptr,  # [K * G]
    alibi_ptr,  # [K * G]
    scale,  # of the scores, the keys' own scale in it
    softcap,
    v_scale,
    window,
    splits,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    Q_T: tl.constexpr,
    Q_H: tl.constexpr,
    W: tl.constexpr,  # of a row of the table
    GP: tl.constexpr,  # power of two >= max(G, 16)
    DP: tl.constexpr,  # power of two >= max(D, 16)
    TILE: tl.constexpr,  # keys a turn
    CHUNK: tl.constexpr,  # keys in a stretch, at least
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    V_SCALE: tl.constexpr,
    IEEE: tl.constexpr,
):
    pid = tl.program_id(0)
    kh = pid % K
    split = pid // K % splits
    s = pid // (K * splits)
    context = tl.load(contexts_ptr + s)
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    first = 0
    origin = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
        origin = first // TILE * TILE
    size = context - origin
    if SPLIT:
        size = tl.maximum(CHUNK, tl.cdiv(tl.cdiv(context - origin, splits), TILE) * TILE)
    used = tl.maximum(tl.cdiv(context - origin, tl.maximum(size, 1)), 1)
    if split >= used:
        return
    start = origin + split * size
    stop = tl.minimum(start + size, context)

    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kh * G + g
    real = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(
        q_ptr + s.to(tl.int64) * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0
    )
    slope = tl.zeros([GP], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E
    acc = tl.zeros([GP, DP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], LOWEST, tl.float32)
    table = tables_ptr + row.to(tl.int64) * W
    n = tl.arange(0, TILE)
    at = start + n
    block = tl.load(table + at // B, mask=(at >= first) & (at < stop), other=0)
    for low in tl.range(start, stop, TILE, num_stages=STAGES):
        at = low + n
        live = (at >= first) & (at < stop)
        # block ids are loaded one turn ahead: the loads of keys and values wait for nothing
        base = block.to(tl.int64) * (2 * K * B * D) + (kh * (B * D) + at % B * D)
        block = tl.load(table + (at + TILE) // B, mask=at + TILE < stop, other=0)
        where = cache_ptr + base[:, None] + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        k = tl.load(where, mask=mask, other=0.0)
        v = tl.load(where + K * B * D, mask=mask, other=0.0)
        scores = bent(product(q, k.to(q.dtype), IEEE), scale, softcap, SOFTCAP)
        if ALIBI:
            scores += slope[:, None] * (at - (context - 1)).to(tl.float32)[None, :]
        scores = tl.where(live[None, :], scores, float("-inf"))
        acc, total, top = absorb(scores, v.to(q.dtype), acc, total, top, IEEE)
    if V_SCALE:
        acc = acc * v_scale

    if SPLIT:
        if used > 1:
            place = s.to(tl.int64) * K + kh
            mine = place * splits + split
            tl.store(part_ptr + mine * (G * D) + g[:, None] * D + d[None, :], acc, mask=real)
            tl.store(stats_ptr + mine * (2 * G) + g, top, mask=g < G)
            tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=g < G)
            tl.debug_barrier()  # every thread's part is stored before one of them counts it
            if tl.atomic_add(done_ptr + place, 1, sem="acq_rel") == used - 1:
                merge(
                    part_ptr, stats_ptr, out_ptr, sinks_ptr, place, kh, used, splits,
                    G, D, GP, DP, SINKS,
                )  # fmt: skip
                tl.store(done_ptr + place, 0)
            return
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        acc, total = join_sink(acc, total, top, sink)
    y = settled(acc, total)
    where = out_ptr + (s.to(tl.int64) * (K * G) + head[:, None]) * D + d[None, :]
    tl.store(where, y.to(out_ptr.dtype.element_ty), mask=real)
