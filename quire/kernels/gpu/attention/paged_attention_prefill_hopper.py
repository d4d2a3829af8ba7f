"""Prefill attention on Hopper: a loader warp and two warpgroups that multiply.

One thread of the loader makes the bulk copy engine (TMA) fetch whole blocks of the cache, which
arrive in shared memory in the layout of the matrix units; no program computes an address. Each
warpgroup has 64 rows (queries times heads) of its own and runs the product of the next keys during
the exponentials of the last: the matrix units wait for neither.

Of many tiles each program takes one after the other from a queue, which is a counter in memory:
its loader takes the next tile and fetches its first keys while the warpgroups finish the last.

A few new tokens after a long prefix make few tiles: as many programs as the device can run then
share the keys of a tile (SPLIT), and for each warpgroup's rows the last program merges the parts.

It supports what most prompts need: causal, 16-bit values, heads of 64 or 128, whole blocks of
the cache in a tile. paged_attention_prefill does the rest.

Axes: T tokens, S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.gpu.attention.paged_attention_prefill_loader import (
    FIELDS,
    HALF,
    NOTES,
    cell_of,
    load_items,
    range_of,
    read_note,
)
from quire.kernels.gpu.attention.split_plan import (
    MIN_SPLIT_KEYS,
    AttentionExtras,
    plan_prefill_splits,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.target import sm_count

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST_SCORE = gl.constexpr(-1.0e30)
_LINES = gl.NVMMASharedLayout(128, 16)
ROWS = gl.constexpr(64)  # of one warpgroup


@gluon.jit
def _softmax_step(s, total, top, at, pos, window, scale, MASK: gl.constexpr, WINDOW: gl.constexpr):
    """(weights, their sums, maxima, what older sums shrink by) after scores s of keys `at`."""
    if MASK:
        seen = at[None, :] <= pos[:, None]
        if WINDOW:
            seen &= at[None, :] > pos[:, None] - window
        s = gl.where(seen, s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, 1) * scale)
    shrink = gl.exp2(top - higher)
    p = gl.exp2(s * scale - higher[:, None])
    return p, total * shrink + gl.sum(p, 1), higher, shrink


@gluon.jit
def _attend_tiles(acc, p, total, top, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, go, pos,
           window, scale, skip, low, high, past, turns, N: gl.constexpr, STAGES: gl.constexpr,
           MASK: gl.constexpr, WINDOW: gl.constexpr, WHICH: gl.constexpr, TURNS: gl.constexpr,
           S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr):  # fmt: skip
    """Key tiles [low, high): scores of tile j while the values of tile j - 1 are absorbed.

    past, turns: tiles and turns of this program before the first of these.
    """
    n = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    for j in range(low, high):
        stage = (past + j) % STAGES
        before = (past + j - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (past + j) // STAGES & 1)
        if TURNS:  # the other warpgroup's products first, while this one took exponentials
            mbarrier.wait(go.index(WHICH), (turns + j - 1 & 1) ^ (1 - WHICH))
        zero = gl.zeros([ROWS, N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), (past + j - 1) // STAGES & 1)
        sums = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(go.index(1 - WHICH), count=1)
        s = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        at = (skip + j) * N + n
        weights, total, top, shrink = _softmax_step(
            s, total, top, at, pos, window, scale, MASK, WINDOW
        )
        # p is among what is waited for: its registers are read until the product is done
        acc, p = warpgroup_mma_wait(0, deps=[sums, p])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
    return acc, p, total, top


@gluon.jit
def _zero_tail(tile, from_row, N: gl.constexpr, D: gl.constexpr):
    """Zero a tile of values from a row on: it is not written there, and 0 * NaN is NaN."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks = tile._reinterpret(tile.dtype, [N // 16 * (D // HALF), 16, HALF], tile.layout)
    r = gl.arange(0, 16, gl.SliceLayout(1, lines))
    for i in range(N // 16):
        if (i + 1) * 16 > from_row:
            for h in gl.static_range(D // HALF):
                part = blocks.index(h * (N // 16) + i)
                x = part.load(lines)
                part.store(gl.where((i * 16 + r < from_row)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _store_part(acc, total, top, part_ptr, stats_ptr, done_ptr, mine, split, used, r, m, d,
           D: gl.constexpr):  # fmt: skip
    """Store a part, [ROWS, D] and its maxima and sums; return how many were stored before it."""
    at = mine + split
    where = (at * (2 * ROWS) + m).to(gl.int64)[:, None] * D + d[None, :]
    gl.store(part_ptr + where, acc)
    gl.store(stats_ptr + at * (4 * ROWS) + r, top)
    gl.store(stats_ptr + at * (4 * ROWS) + 2 * ROWS + r, total)
    gl.thread_barrier()  # every thread's part is stored before one of them counts it
    return gl.atomic_add(done_ptr, 1, sem="acq_rel")


@gluon.jit
def _merge_parts(acc, total, top, part_ptr, stats_ptr, mine, used, r, m, d,
            D: gl.constexpr, O_LAYOUT: gl.constexpr):  # fmt: skip
    """(acc, total, top) over all parts, in their order; its own is one of them."""
    acc = gl.zeros_like(acc)
    total = gl.zeros_like(total)
    top = gl.full_like(top, LOWEST_SCORE)
    for low in range(0, used, 2):
        for i in gl.static_range(2):  # the loads of both are under way before the first is needed
            there = low + i < used
            at = mine + low + i
            where = (at * (2 * ROWS) + m).to(gl.int64)[:, None] * D + d[None, :]
            # past L1 (.cg): other programs wrote these, and a line of it may be stale here
            some = gl.load(part_ptr + where, mask=there, other=0.0, cache_modifier=".cg")
            stats = stats_ptr + at * (4 * ROWS) + r
            its_top = gl.load(stats, mask=there, other=LOWEST_SCORE, cache_modifier=".cg")
            its_sum = gl.load(stats + 2 * ROWS, mask=there, other=0.0, cache_modifier=".cg")
            higher = gl.maximum(top, its_top)
            shrink = gl.exp2(top - higher)
            weight = gl.exp2(its_top - higher)
            total = total * shrink + its_sum * weight
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
            acc += some * gl.convert_layout(weight, gl.SliceLayout(1, O_LAYOUT))[:, None]
            top = higher
    return acc, total, top


@gluon.jit
def _write(acc, total, top, out_ptr, sinks_ptr, token, kh, head, real, r, d,
           K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr,
           SINKS: gl.constexpr, O_LAYOUT: gl.constexpr, LINES: gl.constexpr):  # fmt: skip
    """Divide by the sums, with the sinks in them, and store."""
    if SINKS:
        r_head = kh * G + r % G
        sink = gl.load(sinks_ptr + r_head, mask=r < QUERIES * G, other=0.0).to(gl.float32) * LOG2E
        higher = gl.maximum(top, sink)
        shrink = gl.exp2(top - higher)
        total = total * shrink + gl.exp2(sink - higher)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    y = acc / gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), LINES)
    gl.store(out_ptr + (token * (K * G) + head[:, None]) * D + d[None, :], y, mask=real)


@gluon.jit
def _attend_item(q_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, done_ptr, q_smem, k_smem, v_smem,
            k_full, k_empty, v_full, v_empty, go, kh, begin, queries, lowest, context, skip, count,
            full, window, scale, place, split, splits, used, past, turns,
            WHICH: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
            Q_T: gl.constexpr, Q_H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr,
            STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
            TURNS: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """A warpgroup's 64 rows against the key tiles of an item. past, turns: of the items before."""
    scale = scale * LOG2E
    prefix = context - queries
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, D, gl.SliceLayout(0, LINES))
    query = lowest + m // G
    head = kh * G + m % G
    real = ((m < QUERIES * G) & (query < queries))[:, None]
    token = (begin + query).to(gl.int64)[:, None]
    q_mine = q_smem.index(WHICH)
    q_mine.store(
        gl.load(q_ptr + token * Q_T + head[:, None] * Q_H + d[None, :], mask=real, other=0.0)
    )
    fence_async_shared()
    gl.thread_barrier()

    r = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    pos = prefix + lowest + r // G
    n = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    top = gl.full([ROWS], LOWEST_SCORE, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    stage = past % STAGES
    mbarrier.wait(k_full.index(stage), past // STAGES & 1)
    zero = gl.zeros([ROWS, N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_mine, k_smem.index(stage).permute((1, 0)), zero, use_acc=False)
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, total, top, _ = _softmax_step(
        s, total, top, skip * N + n, pos, window, scale, True, WINDOW
    )
    p = gl.convert_layout(weights.to(v_smem.dtype), P_LAYOUT)
    acc, p, total, top = _attend_tiles(
        acc, p, total, top, q_mine, k_smem, v_smem, k_full, k_empty, v_full, v_empty, go, pos,
        window, scale, skip, 1, full, past, turns, N, STAGES, False, WINDOW, WHICH, TURNS,
        S_LAYOUT, O_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    acc, p, total, top = _attend_tiles(
        acc, p, total, top, q_mine, k_smem, v_smem, k_full, k_empty, v_full, v_empty, go, pos,
        window, scale, skip, gl.maximum(full, 1), count, past, turns, N, STAGES, True, WINDOW,
        WHICH, TURNS, S_LAYOUT, O_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    last = (past + count - 1) % STAGES
    mbarrier.wait(v_full.index(last), (past + count - 1) // STAGES & 1)
    if (skip + count) * N > context:
        _zero_tail(v_smem.index(last), context - (skip + count - 1) * N, N, D)
    acc = warpgroup_mma(p, v_smem.index(last), acc)
    mbarrier.arrive(v_empty.index(last), count=1)

    if SPLIT:
        turn = used - 1
        mine = place * splits
        o_m = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
        o_d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
        done_ptr += place * 2 + WHICH
        if used > 1:
            turn = _store_part(
                acc, total, top, part_ptr, stats_ptr, done_ptr, mine, split, used, r, o_m, o_d, D
            )
        if turn == used - 1:
            if used > 1:
                acc, total, top = _merge_parts(
                    acc, total, top, part_ptr, stats_ptr, mine, used, r, o_m, o_d, D, O_LAYOUT
                )
                gl.store(done_ptr, 0)
            _write(acc, total, top, out_ptr, sinks_ptr, token, kh, head, real, r, d, K, G, D,
                   QUERIES, SINKS, O_LAYOUT, LINES)  # fmt: skip
    else:
        _write(acc, total, top, out_ptr, sinks_ptr, token, kh, head, real, r, d, K, G, D,
               QUERIES, SINKS, O_LAYOUT, LINES)  # fmt: skip


@gluon.jit
def _write_padding(out_ptr, kh, begin, queries, lowest, K: gl.constexpr, G: gl.constexpr, D:
gl.constexpr,
           QUERIES: gl.constexpr):  # fmt: skip
    """Zero the output of padding tokens: later ops compute with them."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, D, gl.SliceLayout(0, LINES))
    query = lowest + m // G
    real = ((m < QUERIES * G) & (query < queries))[:, None]
    at = ((begin + query).to(gl.int64) * (K * G) + kh * G + m % G)[:, None] * D + d[None, :]
    zeros = gl.zeros([2 * ROWS, D], out_ptr.dtype.element_ty, LINES)
    gl.store(out_ptr + at, zeros, mask=real)


@gluon.jit
def _attend(q_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, done_ptr, q_smem, k_smem, v_smem,
            k_full, k_empty, v_full, v_empty, notes, note_full, note_empty, go, window, scale,
            splits, cells,
            WHICH: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
            Q_T: gl.constexpr, Q_H: gl.constexpr, QUERIES: gl.constexpr, N: gl.constexpr,
            LEAST: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
            SINKS: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """One warpgroup: its 64 rows of each tile that the loader notes."""
    read = 0
    past = 0
    turns = 0
    item, begin, queries, lowest, context = read_note(notes, note_full, note_empty, read)
    while item >= 0:
        cell, split = cell_of(item, cells, SPLIT)
        if context == 0:
            if WHICH == 0:
                _write_padding(out_ptr, cell % K, begin, queries, lowest, K, G, D, QUERIES)
        else:
            skip, count, full, used = range_of(
                lowest, queries, context, split, splits, window, QUERIES, N, LEAST, SPLIT, WINDOW
            )
            _attend_item(q_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, done_ptr, q_smem, k_smem,
                         v_smem, k_full, k_empty, v_full, v_empty, go, cell % K, begin, queries,
                         lowest, context, skip, count, full, window, scale, cell, split,
                         splits, used, past, turns, WHICH, K, G, D, Q_T, Q_H, QUERIES, N, STAGES,
                         WINDOW, SINKS, TURNS, SPLIT)  # fmt: skip
            past += count
            turns += count - 1
        read += 1
        item, begin, queries, lowest, context = read_note(notes, note_full, note_empty, read)


@kernel(
    "scale",
    "first_sequence",
    "sequences",
    "window",
    "splits",
    "cells",
    jit=gluon.jit,
)
def prefill_hopper_kernel(
    q_ptr,  # [T, K * G, D]
    tables_ptr,  # [M, W]
    rows_ptr,  # [S], if HAS_ROWS
    q_starts_ptr,  # [S + 1]
    contexts_ptr,  # [S]
    out_ptr,  # [T, K * G, D]
    sinks_ptr,
    part_ptr,  # [cells, splits, 2 * ROWS, D] fp32, if SPLIT
    stats_ptr,  # [cells, splits, 2, 2 * ROWS] fp32: maximum, sum
    counters_ptr,  # int32, zeros before and after: [cells * 2] parts that are stored, if SPLIT,
    # else [1] items taken from the queue, apart from each program's first
    cache_tiles,  # descriptor of the cache as [N * 2 * K * B, D], tiles [B, 64]
    scale,
    first_sequence,
    sequences,
    window,
    splits,
    cells,  # tiles of rows, times KV heads
    K: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    B: gl.constexpr,
    Q_T: gl.constexpr,
    Q_H: gl.constexpr,
    W: gl.constexpr,
    QUERIES: gl.constexpr,
    N: gl.constexpr,
    LEAST: gl.constexpr,  # tiles of keys in a stretch, at least
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_ROWS: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    TURNS: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    note_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, N, D], rows_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, N, D], rows_layout)
    notes = gl.allocate_shared_memory(gl.int32, [NOTES * FIELDS, 1], note_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    note_full = gl.allocate_shared_memory(gl.int64, [NOTES, 1], mbarrier.MBarrierLayout())
    note_empty = gl.allocate_shared_memory(gl.int64, [NOTES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(go.index(0), count=1)
    mbarrier.init(go.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # one by each warpgroup
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(NOTES):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, counters_ptr, q_smem, k_smem,
                       v_smem, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty, go,
                       window, scale, splits, cells, 0, K, G, D, Q_T, Q_H, QUERIES, N, LEAST,
                       SPLIT, STAGES, WINDOW, SINKS, TURNS)),
            (_attend, (q_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, counters_ptr, q_smem, k_smem,
                       v_smem, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty, go,
                       window, scale, splits, cells, 1, K, G, D, Q_T, Q_H, QUERIES, N, LEAST,
                       SPLIT, STAGES, WINDOW, SINKS, TURNS)),
            (load_items, (cache_tiles, tables_ptr, rows_ptr, q_starts_ptr, contexts_ptr,
                     counters_ptr,
                     k_smem, v_smem, k_full, k_empty, v_full, v_empty, notes, note_full,
                     note_empty, first_sequence, sequences, window, splits, cells, K, D, B, W,
                     QUERIES, N, LEAST, SPLIT, STAGES, HAS_ROWS, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


QUEUE_ROUNDS = 2
"""Tiles for each multiprocessor from which programs take them from a queue: fewer start sooner as
programs of their own, of which those without rows end at once."""


def supports(q: Tensor, cache: Tensor, extras: AttentionExtras) -> bool:
    """Whether this kernel serves such prompts; the device must be a Hopper."""
    block, size = cache.shape[3:]
    group = q.shape[1] // cache.shape[2]
    plain = extras.softcap is None and extras.alibi is None and not extras.reach
    plain = plain and extras.spans is None
    kind = q.dtype == cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return plain and kind and size in (64, 128) and block in (16, 32, 64, 128) and group <= 64


def launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    decodes: int,
    extras: AttentionExtras,
    keys: int = 128,
    stages: int = 2,
    turns: bool = True,
) -> None:
    """The sequences after the first `decodes`, of any number of queries."""
    blocks, _, kv_heads, block, size = cache.shape
    group = q.shape[1] // kv_heads
    queries = 2 * 64 // group
    sequences = contexts.shape[0] - decodes
    tokens = q.shape[0] - decodes
    count = tokens // queries + sequences
    longest = tables.shape[1] * block if extras.window is None else 0
    at_once = sm_count(q.device)
    shares = plan_prefill_splits(q, kv_heads, tokens, count, 2 * 64, at_once, extras, longest)
    cells = count * kv_heads
    programs = cells * shares.splits
    if tokens // queries * kv_heads >= QUEUE_ROUNDS * at_once:
        programs = at_once
    counters = shares.counters if shares.counters is not None else extras.counters
    if counters is None:
        counters = torch.zeros(1, dtype=torch.int32, device=q.device)
    tiles = TensorDescriptor(
        cache, [blocks * 2 * kv_heads * block, size], [size, 1], [block, 64], _LINES
    )
    prefill_hopper_kernel(
        (programs, 1, 1),
        (
            q, tables, extras.rows, q_starts, contexts, out, extras.sinks,
            shares.partial_out, shares.partial_stats, counters,
        ),
        (extras.scale, decodes, sequences, extras.window or 0, shares.splits, cells),
        (
            kv_heads, group, size, block, q.stride(0), q.stride(1), tables.stride(0), queries,
            keys, MIN_SPLIT_KEYS // keys, shares.may_split, stages, extras.rows is not None,
            extras.window is not None, extras.sinks is not None, turns,
        ),
        tiles=(tiles,),
    )  # fmt: skip
