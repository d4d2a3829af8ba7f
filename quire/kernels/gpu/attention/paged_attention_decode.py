"""Decode attention kernel: one query token per sequence, split along the context, in one launch.

A program holds all query heads of one KV head of one sequence, so each key and value is read once.
It takes a range of the sequence's context, whose length the kernel computes from the context, so a
captured graph serves every length. The last program of a sequence's KV head to finish merges.

The length of a range depends on the context and on `splits`, on nothing else of the batch. Parts
are merged in the order of the ranges, so the result does not depend on which program was last.
Leading keys that sequences share were read by paged_attention_shared: its parts are merged too.

Where contexts are long (BALANCED), the ranges depend on all contexts: none is longer than a
program's share of all keys, so that one long context does not leave most of the device idle.

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.attention.online_softmax import (
    LOG2E,
    add_distance_bias,
    begin_sums,
    bias_rows,
    dot_qk,
    load_scales,
    online_softmax_step,
    scale_and_softcap,
)
from quire.kernels.gpu.attention.paged_attention_merge import keep_rows, merge_parts, store_result
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel


@triton.jit
def find_program(splits, K: tl.constexpr):
    """(KV head, sequence, range, sequences) of this program.

    First ranges come first: the programs that a short context does not need come last.
    """
    pid = tl.program_id(0)
    sequences = tl.num_programs(0) // (K * splits)
    return pid % K, pid // K % sequences, pid // (K * sequences), sequences


@triton.jit
def split_range(context, window, split, splits, chunk, TILE: tl.constexpr,
            SPLIT: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """(first visible key, start, stop, stretches in use) of one program. Starts are whole tiles.

    chunk: keys of a stretch, at least; whole tiles.
    """
    first = 0
    origin = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
        origin = first // TILE * TILE
    size = context - origin
    if SPLIT:
        size = tl.maximum(chunk // TILE * TILE, tl.cdiv(tl.cdiv(size, splits), TILE) * TILE)
        size = tl.maximum(size, TILE)  # the compiler has no other bound of `chunk`
    used = tl.maximum(tl.cdiv(context - origin, tl.maximum(size, 1)), 1)
    start = origin + split * size
    return first, start, tl.minimum(start + size, context), used


@triton.jit
def find_balanced_range(contexts_ptr, room, chunk, K: tl.constexpr, TILE: tl.constexpr,
                        SP: tl.constexpr):  # fmt: skip
    """(KV head, sequence, its context, start, stop, range, ranges in use, number of the sequence's
    first part) of one program.

    room: ranges of a KV head, more than sequences. The ranges of all sequences follow one another
    in the grid, which has as many programs of a head as sequences and `room`: the last are unused,
    and have no range in use. SP: a power of two, at least the number of sequences.
    """
    kh = tl.program_id(0) % K
    number = tl.program_id(0) // K
    programs = tl.num_programs(0) // K
    sequences = programs - room
    i = tl.arange(0, SP)
    contexts = tl.load(contexts_ptr + i, mask=i < sequences, other=0)
    tiles = (contexts + TILE - 1) // TILE
    rows = tl.sum((contexts > 0).to(tl.int32), 0)
    longest = tl.maximum(tl.cdiv(tl.sum(tiles, 0), room - rows), chunk // TILE)
    ranges = tl.where(i < sequences, tl.maximum((tiles + longest - 1) // longest, 1), 0)
    ends = tl.cumsum(ranges, 0)
    s = tl.sum(((ends <= number) & (i < sequences)).to(tl.int32), 0)
    context = tl.sum(tl.where(i == s, contexts, 0), 0)
    used = tl.sum(tl.where(i == s, ranges, 0), 0)
    begin = tl.sum(tl.where(i == s, ends - ranges, 0), 0)
    split = number - begin
    size = tl.cdiv(tl.cdiv(context, TILE), tl.maximum(used, 1)) * TILE
    start = split * size
    stop = tl.minimum(start + size, context)
    part = kh.to(tl.int64) * programs + begin
    return kh, s, context, start, stop, split, used, part


@triton.jit
def load_tile(cache_ptr, scales_ptr, table, kh, at, live, K: tl.constexpr, D: tl.constexpr,
              B: tl.constexpr, HEAD: tl.constexpr, S_N: tl.constexpr, S_H: tl.constexpr,
              S_T: tl.constexpr, SCALES: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """Keys and values [TILE, DP] at positions `at`, and their scales; 0 where not live."""
    d = tl.arange(0, DP)
    block = tl.load(table + at // B, mask=live, other=0)
    base = block.to(tl.int64) * (2 * K * HEAD) + (kh * HEAD + at % B * D)
    where = cache_ptr + base[:, None] + d[None, :]
    k_scales, v_scales = load_scales(scales_ptr, block, at, live, kh, K, B, S_N, S_H, S_T, SCALES)
    mask = live[:, None] & (d < D)[None, :]
    k = tl.load(where, mask=mask, other=0.0)
    v = tl.load(where + K * HEAD, mask=mask, other=0.0)
    return k, v, k_scales, v_scales


@triton.jit
def attend_range(acc, total, top, q, cache_ptr, scales_ptr, table, kh, first, start, stop, newest,
                 slope, bias, scale, softcap,
                 K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HEAD: tl.constexpr,
                 S_N: tl.constexpr, S_H: tl.constexpr, S_T: tl.constexpr, SCALES: tl.constexpr,
                 DP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                 SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, REACH: tl.constexpr,
                 IEEE: tl.constexpr, since=None, until=None):  # fmt: skip
    """Absorb the keys [start, stop) that are not below `first`; the query is at `newest`.

    since, until: [M], those that each row sees, if not all of them.
    """
    n = tl.arange(0, TILE)
    for low in tl.range(start, stop, TILE, num_stages=STAGES):
        at = low + n
        live = (at >= first) & (at < stop)
        k, v, k_scales, v_scales = load_tile(
            cache_ptr, scales_ptr, table, kh, at, live, K, D, B, HEAD, S_N, S_H, S_T, SCALES, DP
        )
        dot = dot_qk(q, k.to(q.dtype), k_scales, SCALES, IEEE)
        scores = scale_and_softcap(dot, scale, softcap, SOFTCAP)
        if ALIBI:
            scores += slope[:, None] * (at - newest).to(tl.float32)[None, :]
        if REACH:
            scores = add_distance_bias(scores, (at - newest)[None, :], bias, REACH)
        seen = live[None, :]
        if until is not None:
            seen = seen & (at[None, :] < until[:, None])
        if since is not None:
            seen = seen & (at[None, :] >= since[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        acc, total, top = online_softmax_step(
            scores, v.to(q.dtype), v_scales, acc, total, top, SCALES, IEEE
        )
    return acc, total, top


@triton.jit
def store_or_merge(acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr,
                   shared_part_ptr, shared_stats_ptr, shared, shared_splits, s, kh, split, used,
                   part,
                   K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr,
                   DP: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
                   SHARED: tl.constexpr):  # fmt: skip
    """Store the result, or a part of it; the program that stores the last part merges them all.

    part: number of the sequence's first part of this head, int64.
    """
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    real = (g < G)[:, None] & (d < D)[None, :]
    place = s.to(tl.int64) * K + kh
    GM: tl.constexpr = triton.next_power_of_2(G)
    if SPLIT and used > 1:
        mine = part + split
        tl.store(part_ptr + mine * (G * D) + g[:, None] * D + d[None, :], acc, mask=real)
        tl.store(stats_ptr + mine * (2 * G) + g, top, mask=g < G)
        tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=g < G)
        tl.debug_barrier()  # every thread's part is stored before one of them counts it
        if tl.atomic_add(done_ptr + place, 1, sem="acq_rel") == used - 1:
            whole, whole_total, whole_top = merge_parts(
                part_ptr, stats_ptr, part, used, G, D, GM, DP
            )
            store_result(
                whole, whole_total, whole_top, out_ptr, sinks_ptr, shared_part_ptr,
                shared_stats_ptr, shared, shared_splits, place, kh, G, D, GM, DP, SINKS, SHARED,
            )  # fmt: skip
            tl.store(done_ptr + place, 0)
    else:
        ROWS: tl.constexpr = GM if SHARED else GP
        own, own_total, own_top = keep_rows(acc, total, top, GP, ROWS, DP)
        store_result(
            own, own_total, own_top, out_ptr, sinks_ptr, shared_part_ptr, shared_stats_ptr, shared,
            shared_splits, place, kh, G, D, ROWS, DP, SINKS, SHARED,
        )  # fmt: skip


@kernel("scale", "softcap", "v_scale", "window", "splits", "chunk", "shared_splits")
def decode_kernel(
    q_ptr,  # [S, K * G, D]
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table, if HAS_ROWS
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,  # [S, K, splits, G, D] fp32, if SPLIT; [K, S + splits, G, D], if BALANCED
    stats_ptr,  # the same with [2, G]: maximum, sum
    done_ptr,  # [S * K] int32, zeros before and after
    sinks_ptr,  # [K * G]
    alibi_ptr,  # [K * G]
    bias_ptr,  # [K * G, 2 * REACH + 1] fp32, if REACH
    shared_ptr,  # [S] leading keys that another kernel has attended to, if SHARED
    shared_part_ptr,  # [S, K, shared_splits, G, D] fp32: its parts
    shared_stats_ptr,
    scale,  # of the scores, the keys' own scale in it
    softcap,
    v_scale,
    window,
    splits,  # most ranges of a context; if BALANCED, ranges of a KV head
    chunk,  # keys of a range, at least
    shared_splits,
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
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    REACH: tl.constexpr,
    SHARED: tl.constexpr,  # the shortest range of shared keys; 0: there are none
    BALANCED: tl.constexpr,  # a power of two >= S; 0: ranges depend on their own context alone
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    shared = 0
    if BALANCED:
        kh, s, context, start, stop, split, used, part = find_balanced_range(
            contexts_ptr, splits, chunk, K, TILE, BALANCED
        )
        first = 0
    else:
        kh, s, split, _ = find_program(splits, K)
        context = tl.load(contexts_ptr + s)
        BOUND: tl.constexpr = WINDOW or SHARED > 0
        if SHARED:
            shared = tl.load(shared_ptr + s)
            window = context - shared
        first, start, stop, used = split_range(
            context, window, split, splits, chunk, TILE, SPLIT, BOUND
        )
        part = (s.to(tl.int64) * K + kh) * splits
    if split >= used:
        return
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kh * G + g
    q = tl.load(
        q_ptr + s.to(tl.int64) * Q_T + head[:, None] * Q_H + d[None, :],
        mask=(g < G)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    slope = tl.zeros([GP], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E
    bias = slope
    if REACH:
        bias = bias_rows(bias_ptr, head, g < G, REACH)
    acc, total, top = begin_sums(GP, DP)
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, scales_ptr, tables_ptr + row.to(tl.int64) * W, kh, first,
        start, stop, context - 1, slope, bias, scale, softcap, K, D, B, HEAD, S_N, S_H, S_T, SCALES,
        DP, TILE, STAGES, SOFTCAP, ALIBI, REACH, IEEE,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    store_or_merge(
        acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, shared_part_ptr,
        shared_stats_ptr, shared, shared_splits, s, kh, split, used, part, K, G, D, GP, DP, SPLIT,
        SINKS, SHARED,
    )  # fmt: skip
