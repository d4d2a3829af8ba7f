"""Merge of split attention: combines the parts of one sequence's context, a softmax over softmaxes.

It is inlined, not a kernel: the last program to finish of those that share a context calls it. It
reads the parts in their order, so the result is one fixed sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.attention.online_softmax import (
    LOG2E,
    LOWEST_SCORE,
    begin_sums,
    join_part,
    join_sink,
    normalize,
)

MAX_UNROLLED = tl.constexpr(4)


@triton.jit
def shared_range(tokens, splits, CHUNK: tl.constexpr):
    """(keys of a range, ranges in use) of shared leading keys: at least CHUNK, in blocks of it."""
    size = tl.maximum(tl.cdiv(tl.cdiv(tokens, splits), CHUNK), 1) * CHUNK
    return size, tl.cdiv(tokens, size)


@triton.jit
def merge_parts(
    part_ptr,  # [parts, G, D]
    stats_ptr,  # [parts, 2, G]: maximum, sum
    first,  # int64: number of the first part
    used,
    G: tl.constexpr,
    D: tl.constexpr,
    GP: tl.constexpr,  # power of two >= G
    DP: tl.constexpr,
):
    """(acc, total, top) over `used` parts that follow one another."""
    acc, total, top = begin_sums(GP, DP)
    return absorb_parts(acc, total, top, part_ptr, stats_ptr, first, used, G, D, GP, DP)


@triton.jit
def absorb_parts(acc, total, top, part_ptr, stats_ptr, first, used,
                 G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """(acc, total, top) with `used` parts, laid out as for merge_parts()."""
    # parts whose loads are under way at once, unrolled: a sum over an axis of parts goes through
    # shared memory, which takes longer than all else of a short context
    MERGE: tl.constexpr = max(1, min(MAX_UNROLLED, 8192 // (GP * DP)))
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    mask = (g < G)[:, None] & (d < D)[None, :]
    where = g[:, None] * D + d[None, :]
    for low in range(0, used, MERGE):
        for i in tl.static_range(MERGE):
            there = low + i < used
            mine = first + low + i
            # past L1 (.cg): other programs wrote these, and a line of it may be stale here
            some = tl.load(
                part_ptr + mine * (G * D) + where, mask=mask & there, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            stats = stats_ptr + mine * (2 * G) + g
            its_top = tl.load(stats, mask=(g < G) & there, other=LOWEST_SCORE, cache_modifier=".cg")
            its_sum = tl.load(stats + G, mask=(g < G) & there, other=0.0, cache_modifier=".cg")
            acc, total, top = join_part(acc, total, top, some, its_sum, its_top)
    return acc, total, top


@triton.jit
def keep_rows(acc, total, top, GP: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr):
    """The first ROWS of GP rows. Those behind only fill the tile of a product, and would take most
    of the instructions of a merge."""
    if ROWS < GP:
        g = tl.arange(0, ROWS)
        return (
            tl.gather(acc, tl.broadcast_to(g[:, None], [ROWS, DP]), 0),
            tl.gather(total, g, 0),
            tl.gather(top, g, 0),
        )
    else:
        return acc, total, top


@triton.jit
def store_result(acc, total, top, out_ptr, sinks_ptr, shared_part_ptr, shared_stats_ptr, shared,
                 shared_splits, place, kh,
                 G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr,
                 SINKS: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """Store out[place], [G, D], with the parts of shared leading keys and the sink.

    place: sequence times K plus kh, int64. shared: tokens of the shared keys. SHARED: the shortest
    range of these; 0: there are none.
    """
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    if SHARED:
        _, used = shared_range(shared, shared_splits, SHARED)
        acc, total, top = absorb_parts(
            acc, total, top, shared_part_ptr, shared_stats_ptr, place * shared_splits, used,
            G, D, GP, DP,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks_ptr + kh * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2E
        acc, total = join_sink(acc, total, top, sink)
    y = normalize(acc, total)
    mask = (g < G)[:, None] & (d < D)[None, :]
    where = place * (G * D) + g[:, None] * D + d[None, :]
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)
