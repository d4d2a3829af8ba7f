"""Prefill attention kernel: several query tokens per sequence (prompts, chunks of prompts, drafts).

A program holds a tile of query tokens times all query heads of one KV head. It reads the cached
prefix through the block table, then the step's own keys and values from the projection's output
(FRESH): no table, no gather, and for a new prompt there is nothing else. Without FRESH it reads
everything through the table. Tiles that are visible to every query need no mask.

A few new tokens after a long prefix make few programs. SPLIT divides such a prefix: each program
takes a range of it, the last of them the step's own keys too, and the program that finishes last
merges. The kernel computes the ranges, so a captured graph serves every context.

Axes: T tokens, S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
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
    join_sink,
    load_scales,
    normalize,
    online_softmax_step,
    scale_and_softcap,
)
from quire.kernels.gpu.attention.paged_attention_merge import merge_parts
from quire.kernels.gpu.runtime.fast_launch import kernel

SCAN = tl.constexpr(256)


@triton.jit
def sequence_of(q_starts_ptr, first, sequences, tile, QUERIES: tl.constexpr):
    """(sequence, its first tile). Each of `sequences` from `first` on has at most
    tokens // QUERIES + 1 tiles, so it may begin at (tokens before it) // QUERIES + its number."""
    count = 0
    for low in range(0, sequences, SCAN):
        i = low + tl.arange(0, SCAN)
        begin = tl.load(q_starts_ptr + first + i, mask=i < sequences, other=0) - first
        count += tl.sum(((begin // QUERIES + i <= tile) & (i < sequences)).to(tl.int32))
    begin = tl.load(q_starts_ptr + first + count - 1) - first
    return first + count - 1, begin // QUERIES + count - 1


@triton.jit
def _scores(q, k, k_scales, at, pos, end, slope, bias, scale, softcap, window, span,
            SCALES: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, REACH: tl.constexpr,
            SPANS: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Scores of keys at positions `at` (below end) for queries at `pos`, invisible ones -inf."""
    dot = dot_qk(q, k, k_scales, SCALES, IEEE)
    scores = scale_and_softcap(dot, scale, softcap, SOFTCAP)
    if ALIBI:
        scores += slope[:, None] * (at[None, :] - pos[:, None]).to(tl.float32)
    if REACH:
        scores = add_distance_bias(scores, at[None, :] - pos[:, None], bias, REACH)
    if MASK:
        seen = at[None, :] <= pos[:, None]
        if WINDOW:
            seen &= at[None, :] > pos[:, None] - window
        if SPANS:
            seen |= (at[None, :] >= span[0][:, None]) & (at[None, :] < span[1][:, None])
        seen &= (at < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _attend_cached_keys(acc, total, top, q, pos, low, high, first, end, cache_ptr, scales_ptr,
            table, kh, slope, bias, scale, softcap, window, span,
            K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HEAD: tl.constexpr,
            S_N: tl.constexpr, S_H: tl.constexpr, S_T: tl.constexpr, SCALES: tl.constexpr,
            DP: tl.constexpr,
            TILE: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
            SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, REACH: tl.constexpr,
            SPANS: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Absorb the keys at [low, high) that lie in [first, end), read through the block table."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    block = tl.load(
        table + (low + n) // B, mask=(low + n >= first) & (low + n < tl.minimum(end, high)), other=0
    )
    for turn in tl.range(low, high, TILE, num_stages=STAGES):
        at = turn + n
        base = block.to(tl.int64) * (2 * K * HEAD) + (kh * HEAD + at % B * D)
        seen = at >= 0
        if MASK:
            seen = (at >= first) & (at < end)
        k_scales, v_scales = load_scales(
            scales_ptr, block, at, seen, kh, K, B, S_N, S_H, S_T, SCALES
        )
        ahead = at + TILE
        block = tl.load(table + ahead // B, mask=(ahead < high) & (ahead < end), other=0)
        where = cache_ptr + base[:, None] + d[None, :]
        mask = (d < D)[None, :]
        if MASK:
            mask = mask & seen[:, None]
        k = tl.load(where, mask=mask, other=0.0)
        v = tl.load(where + K * HEAD, mask=mask, other=0.0)
        s = _scores(q, k.to(q.dtype), k_scales, at, pos, end, slope, bias, scale, softcap, window,
                    span, SCALES, MASK, WINDOW, SOFTCAP, ALIBI, REACH, SPANS, IEEE)  # fmt: skip
        acc, total, top = online_softmax_step(
            s, v.to(q.dtype), v_scales, acc, total, top, SCALES, IEEE
        )
    return acc, total, top


@triton.jit
def _attend_new_keys(acc, total, top, q, pos, low, high, end, begin, k_ptr, v_ptr, kh,
           slope, bias, scale, softcap, window,
           D: tl.constexpr, K_T: tl.constexpr, V_T: tl.constexpr,
           DP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
           MASK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
           ALIBI: tl.constexpr, REACH: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Absorb the step's own keys [low, high), counted from the sequence's first new token."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    for turn in tl.range(low, high, TILE, num_stages=STAGES):
        at = turn + n
        if TMA and not MASK:
            k = k_ptr.load([begin + turn, kh * D])
            v = v_ptr.load([begin + turn, kh * D])
        else:
            token = (begin + at).to(tl.int64)[:, None]
            mask = (d < D)[None, :]
            if MASK:  # the next sequence's values must not be used: 0 * NaN is NaN
                mask = mask & (at < end)[:, None]
            k = tl.load(k_ptr + token * K_T + kh * D + d[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + token * V_T + kh * D + d[None, :], mask=mask, other=0.0)
        s = _scores(q, k, at, at, pos, end, slope, bias, scale, softcap, window, (pos, pos),
                    False, MASK, WINDOW, SOFTCAP, ALIBI, REACH, False, IEEE)  # fmt: skip
        acc, total, top = online_softmax_step(s, v, at, acc, total, top, False, IEEE)
    return acc, total, top


@kernel("scale", "softcap", "v_scale", "window", "first_sequence", "sequences", "splits")
def prefill_kernel(
    q_ptr,  # [T, K * G, D]
    k_ptr,  # [T, K, D], if FRESH
    v_ptr,  # [T, K, D], if FRESH
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S], if HAS_ROWS
    q_starts_ptr,  # [S + 1]
    contexts_ptr,  # [S]
    spans_ptr,  # [T, 2], or None
    out_ptr,  # [T, K * G, D]
    sinks_ptr,
    alibi_ptr,
    bias_ptr,  # [K * G, 2 * REACH + 1] fp32, if REACH
    part_ptr,  # [tiles, K, splits, M, D] fp32, if SPLIT
    stats_ptr,  # [tiles, K, splits, 2, M] fp32: maximum, sum
    done_ptr,  # [tiles * K] int32, zeros before and after
    k_tiles,  # tensor descriptor of k as [T, K * D], if TMA
    v_tiles,
    scale,
    softcap,
    v_scale,
    window,
    first_sequence,  # earlier sequences have one query each: another kernel computes them
    sequences,
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
    K_T: tl.constexpr,
    V_T: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,  # rows of a tile: query tokens times G
    QUERIES: tl.constexpr,  # M // G
    DP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # keys in a stretch of the prefix, at least
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    FRESH: tl.constexpr,
    TMA: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    REACH: tl.constexpr,
    IEEE: tl.constexpr,
):
    # late tiles are the long ones: they start first, so that none runs alone at the end; and
    # first stretches before others: the programs that a short prefix does not need come last
    programs = tl.num_programs(0) // splits
    pid = programs - 1 - tl.program_id(0) % programs
    kh = pid % K
    tile = pid // K
    split = tl.program_id(0) // programs
    s, first_tile = sequence_of(q_starts_ptr, first_sequence, sequences, tile, QUERIES)
    begin = tl.load(q_starts_ptr + s)
    queries = tl.load(q_starts_ptr + s + 1) - begin
    lowest = (tile - first_tile) * QUERIES
    if lowest >= queries:
        return
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    prefix = tl.load(contexts_ptr + s) - queries
    highest = tl.minimum(lowest + QUERIES, queries)  # one past the tile's last query

    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    query = lowest + m // G
    head = kh * G + m % G
    real = ((m < QUERIES * G) & (query < queries))[:, None] & (d < D)[None, :]
    token = (begin + query).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0)
    slope = tl.zeros([M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=m < QUERIES * G, other=0.0).to(tl.float32) * LOG2E
    bias = slope
    if REACH:
        bias = bias_rows(bias_ptr, head, m < QUERIES * G, REACH)
    acc, total, top = begin_sums(M, DP)
    table = tables_ptr + row.to(tl.int64) * W

    # Through the table: [low, full) is visible to every query, [full, end) needs the mask.
    SPANS: tl.constexpr = spans_ptr is not None
    span = (query, query)
    if SPANS:
        span_at = spans_ptr + (begin + query).to(tl.int64) * 2
        asked = (m < QUERIES * G) & (query < queries)
        span = (tl.load(span_at, asked, 0), tl.load(span_at + 1, asked, 0))
        span_low = tl.where(span[0] < span[1], span[0], prefix + lowest)
    end = prefix
    full = prefix // TILE * TILE
    if not FRESH:
        end = prefix + highest
        if SPANS:
            end = tl.maximum(end, tl.max(span[1]))
        full = (prefix + lowest + 1) // TILE * TILE
    low = 0
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(prefix + lowest + 1 - window, 0)
        if SPANS:
            oldest = tl.minimum(oldest, tl.min(span_low))
        low = tl.minimum(oldest // TILE * TILE, full)
        full = low
    used = 1
    if SPLIT:
        size = tl.maximum(CHUNK, tl.cdiv(tl.cdiv(full - low, splits), TILE) * TILE)
        used = tl.maximum(tl.cdiv(full - low, size), 1)
        if split >= used:
            return
        low += split * size
        if split < used - 1:
            full = low + size
            end = full
    pos = prefix + query
    if not WINDOW:
        acc, total, top = _attend_cached_keys(
            acc, total, top, q, pos, low, full, oldest, end, cache_ptr, scales_ptr, table, kh,
            slope, bias, scale, softcap, window, span, K, D, B, HEAD, S_N, S_H, S_T, SCALES, DP,
            TILE, STAGES, False, WINDOW, SOFTCAP, ALIBI, REACH, SPANS, IEEE,
        )  # fmt: skip
    acc, total, top = _attend_cached_keys(
        acc, total, top, q, pos, full, end, oldest, end, cache_ptr, scales_ptr, table, kh, slope,
        bias, scale, softcap, window, span, K, D, B, HEAD, S_N, S_H, S_T, SCALES, DP, TILE, STAGES,
        True, WINDOW, SOFTCAP, ALIBI, REACH, SPANS, IEEE,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    if FRESH:
        low = 0
        full = (lowest + 1) // TILE * TILE
        if SPLIT and split < used - 1:
            full = 0
            highest = 0
        if WINDOW:
            low = tl.maximum(lowest + 1 - window, 0) // TILE * TILE
            full = low
        else:
            if TMA:
                acc, total, top = _attend_new_keys(
                    acc, total, top, q, query, low, full, highest, begin, k_tiles, v_tiles,
                    kh, slope, bias, scale, softcap, window,
                    D, K_T, V_T, DP, TILE, STAGES, TMA, False, WINDOW, SOFTCAP, ALIBI, REACH, IEEE,
                )  # fmt: skip
            else:
                acc, total, top = _attend_new_keys(
                    acc, total, top, q, query, low, full, highest, begin, k_ptr, v_ptr,
                    kh, slope, bias, scale, softcap, window,
                    D, K_T, V_T, DP, TILE, STAGES, TMA, False, WINDOW, SOFTCAP, ALIBI, REACH, IEEE,
                )  # fmt: skip
        acc, total, top = _attend_new_keys(
            acc, total, top, q, query, full, highest, highest, begin, k_ptr, v_ptr,
            kh, slope, bias, scale, softcap, window,
            D, K_T, V_T, DP, TILE, STAGES, TMA, True, WINDOW, SOFTCAP, ALIBI, REACH, IEEE,
        )  # fmt: skip
    if SPLIT:
        place = (tile * K + kh).to(tl.int64)
        turn = used - 1
        if used > 1:
            mine = place * splits + split
            part = part_ptr + mine * (M * D) + m[:, None] * D + d[None, :]
            tl.store(part, acc, mask=(d < D)[None, :])
            tl.store(stats_ptr + mine * (2 * M) + m, top)
            tl.store(stats_ptr + mine * (2 * M) + M + m, total)
            tl.debug_barrier()  # every thread's part is stored before one of them counts it
            turn = tl.atomic_add(done_ptr + place, 1, sem="acq_rel")
        if turn < used - 1:
            return
        if used > 1:
            acc, total, top = merge_parts(part_ptr, stats_ptr, place * splits, used, M, D, M, DP)
            tl.store(done_ptr + place, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=m < QUERIES * G, other=0.0).to(tl.float32) * LOG2E
        acc, total = join_sink(acc, total, top, sink)
    y = normalize(acc, total)
    where = out_ptr + (token * (K * G) + head[:, None]) * D + d[None, :]
    tl.store(where, y.to(out_ptr.dtype.element_ty), mask=real)
