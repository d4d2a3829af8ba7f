"""Put the stretches of one sequence's context together: a softmax over parts of a softmax.

Not a kernel of its own: the last program of the decode kernel to finish calls it. It goes through
the parts in their order, MERGE at a time, so the result is one fixed sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.paged_attention_scores import LOG2E, LOWEST

MERGE = tl.constexpr(8)


@triton.jit
def merge(
    part_ptr,  # [S * K, splits, G, D]
    stats_ptr,  # [S * K, splits, 2, G]
    out_ptr,  # [S, K * G, D]
    sinks_ptr,
    place,  # s * K + kh, int64
    kh,
    used,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    GP: tl.constexpr,
    DP: tl.constexpr,
    SINKS: tl.constexpr,
):
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    part = tl.arange(0, MERGE)
    acc = tl.zeros([GP, DP], tl.float32)
    total = tl.zeros([GP], tl.float32)
    top = tl.full([GP], LOWEST, tl.float32)
    for low in range(0, used, MERGE):
        i = low + part
        there = (i < used)[:, None] & (g < G)[None, :]
        stats = stats_ptr + (place * splits + i)[:, None] * (2 * G) + g[None, :]
        # past L1 (.cg): other programs wrote these, and a line of it may be stale here
        tops = tl.load(stats, mask=there, other=LOWEST, cache_modifier=".cg")  # [MERGE, GP]
        sums = tl.load(stats + G, mask=there, other=0.0, cache_modifier=".cg")
        where = (place * splits + i)[:, None, None] * (G * D) + g[None, :, None] * D
        mask = there[:, :, None] & (d < D)[None, None, :]
        some = tl.load(
            part_ptr + where + d[None, None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(tops - higher[None, :])
        total = total * shrink + tl.sum(sums * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(some * weight[:, :, None], 0)
        top = higher
    head = kh * G + g
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - higher)
    total = tl.where(g < G, total, 1.0)
    y = acc / total[:, None]
    where = out_ptr + (place * G + g)[:, None] * D + d[None, :]
    tl.store(where, y.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])
