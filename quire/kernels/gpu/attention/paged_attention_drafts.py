"""Decode attention kernel of rows with drafts: rows of one sequence that follow one another.

A program holds the query heads of one KV head for up to PACK of such rows, so that they read each
key and value once. The rows are found on the device, so a captured graph serves any drafts: rows of
one table row whose contexts grow by one. Every row has a program for each range, and those of rows
that are in the pack of another have nothing to do. Ranges and merging are as in
paged_attention_decode, by the context of the pack's last row.

Axes: S rows, K kv heads, G query heads of one KV head, D head size, B block size, M = PACK * G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.attention.kv_codes import CodeLayout
from quire.kernels.gpu.attention.online_softmax import (
    LOG2E,
    LOWEST_SCORE,
    begin_sums,
    join_part,
    join_sink,
    normalize,
)
from quire.kernels.gpu.attention.paged_attention_decode import (
    attend_range,
    find_program,
    split_range,
)
from quire.kernels.gpu.attention.split_plan import (
    AttentionExtras,
    allocate_split_workspace,
    plan_decode,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import cdiv, next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel

MAX_CHAIN = 64
"""Rows that a row looks back over. Later ones of a longer chain are each a pack of their own."""
MAX_PACK_GROUP = 16
"""Query heads of a KV head from which on a row fills the tensor cores by itself."""
MAX_PARTS = 2048
"""Rows times ranges of a launch, whose parts are in memory."""


def pack_rows(group: int) -> int:
    """Return the rows of a program: a tile of the tensor cores, or four rows of large groups."""
    return max(16 // next_power_of_2(group), 4) if group <= MAX_PACK_GROUP else 1


@triton.jit
def find_pack(s, sequences, rows_ptr, contexts_ptr, PACK: tl.constexpr, BACK: tl.constexpr):
    """(table row of s, its context, its place in its chain, rows of the pack that it begins; 0: it
    is in another's)."""
    row = tl.load(rows_ptr + s)
    context = tl.load(contexts_ptr + s)
    back = tl.arange(0, BACK)
    there = back <= s
    its_row = tl.load(rows_ptr + s - back, mask=there, other=-1)
    its_context = tl.load(contexts_ptr + s - back, mask=there, other=-1)
    place = tl.sum(((its_row == row) & (its_context == context - back)).to(tl.int32)) - 1
    ahead = tl.arange(0, PACK)
    there = s + ahead < sequences
    its_row = tl.load(rows_ptr + s + ahead, mask=there, other=-1)
    its_context = tl.load(contexts_ptr + s + ahead, mask=there, other=-1)
    count = tl.sum(((its_row == row) & (its_context == context + ahead)).to(tl.int32))
    count = tl.where(place % PACK == 0, count, 0)
    return row, context, place, tl.where(place == BACK - 1, 1, count)


@triton.jit
def _merge_parts(part_ptr, stats_ptr, places, real, g, used, splits,
                 G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, DP: tl.constexpr,
                 WARPS: tl.constexpr):  # fmt: skip
    """(acc, total, top) over the first `used` parts of each place, [M]."""
    # parts whose loads are under way at once: as many as 64 registers a thread hold
    MERGE: tl.constexpr = max(2, min(16, max(4, WARPS) * 2048 // (M * DP)))
    d = tl.arange(0, DP)
    mask = real[:, None] & (d < D)[None, :]
    acc, total, top = begin_sums(M, DP)
    for low in range(0, used, MERGE):
        for i in tl.static_range(MERGE):
            there = low + i < used
            mine = places * splits + low + i
            # past L1 (.cg): other programs wrote these, and a line of it may be stale here
            some = tl.load(
                part_ptr + (mine * (G * D) + g * D)[:, None] + d[None, :], mask=mask & there,
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            stats = stats_ptr + mine * (2 * G) + g
            its_top = tl.load(stats, mask=real & there, other=LOWEST_SCORE, cache_modifier=".cg")
            its_sum = tl.load(stats + G, mask=real & there, other=0.0, cache_modifier=".cg")
            acc, total, top = join_part(acc, total, top, some, its_sum, its_top)
    return acc, total, top


@triton.jit
def store_or_merge_pack(acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, s, kh,
                        places, real, g, split, used, splits, K: tl.constexpr, G: tl.constexpr,
                        D: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr,
                        SINKS: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Store the results of a pack, or parts of them; who stores the last part merges them all."""
    d = tl.arange(0, DP)
    finished = used > 0
    if SPLIT and used > 1:
        mine = places * splits + split
        tl.store(
            part_ptr + (mine * (G * D) + g * D)[:, None] + d[None, :], acc,
            mask=real[:, None] & (d < D)[None, :],
        )  # fmt: skip
        tl.store(stats_ptr + mine * (2 * G) + g, top, mask=real)
        tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=real)
        tl.debug_barrier()  # every thread's part is stored before one of them counts it
        done = done_ptr + s * K + kh
        finished = tl.atomic_add(done, 1, sem="acq_rel") == used - 1
        if finished:
            acc, total, top = _merge_parts(
                part_ptr, stats_ptr, places, real, g, used, splits, G, D, M, DP, WARPS
            )
            tl.store(done, 0)
    if finished:
        if SINKS:
            sink = tl.load(sinks_ptr + kh * G + g, mask=real, other=0.0).to(tl.float32) * LOG2E
            acc, total = join_sink(acc, total, top, sink)
        y = normalize(acc, total)
        tl.store(
            out_ptr + ((places * G + g) * D)[:, None] + d[None, :],
            y.to(out_ptr.dtype.element_ty), mask=real[:, None] & (d < D)[None, :],
        )  # fmt: skip


@kernel("scale", "softcap", "v_scale", "window", "splits", "chunk")
def draft_decode_kernel(
    q_ptr,  # [S, K * G, D]
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,  # [S, K, splits, G, D] fp32, if SPLIT
    stats_ptr,  # [S, K, splits, 2, G] fp32: maximum, sum
    done_ptr,  # [S * K] int32, zeros before and after
    sinks_ptr,  # [K * G]
    scale,  # of the scores, the keys' own scale in it
    softcap,
    v_scale,
    window,
    splits,
    chunk,  # keys of a stretch, at least
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
    PACK: tl.constexpr,  # power of two
    BACK: tl.constexpr,
    M: tl.constexpr,  # power of two >= max(PACK * G, 16)
    DP: tl.constexpr,  # power of two >= max(D, 16)
    TILE: tl.constexpr,  # keys a turn
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    IEEE: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    kh, s, split, sequences = find_program(splits, K)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    row, context, _, count = find_pack(s, sequences, rows_ptr, contexts_ptr, PACK, BACK)
    if count == 0:
        return
    first, start, stop, used = split_range(
        context + count - 1, window + count - 1, split, splits, chunk, TILE, SPLIT, WINDOW
    )
    if split >= used:
        return
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    member = m // G
    g = m % G
    real = member < count
    places = (s.to(tl.int64) + member) * K + kh
    q = tl.load(
        q_ptr + ((s.to(tl.int64) + member) * Q_T + (kh * G + g) * Q_H)[:, None] + d[None, :],
        mask=real[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    end = context + member  # of the keys that a row sees
    acc, total, top = begin_sums(M, DP)
    table = tables_ptr + row.to(tl.int64) * W
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, scales_ptr, table, kh, first, start, stop, 0, top, top,
        scale, softcap, K, D, B, HEAD, S_N, S_H, S_T, SCALES, DP, TILE, STAGES, SOFTCAP, False, 0,
        IEEE, end - window if WINDOW else None, end,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    store_or_merge_pack(
        acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, s, kh, places, real, g,
        split, used, splits, K, G, D, M, DP, SPLIT, SINKS, WARPS,
    )  # fmt: skip


def supports(q: Tensor, cache: Tensor, extras: AttentionExtras) -> bool:
    """Whether the kernel does it: no biases, and groups of which a program takes several rows."""
    biased = extras.alibi is not None or extras.position_bias is not None
    if biased or extras.rows is None or extras.shared is not None:
        return False
    return pack_rows(q.shape[1] // cache.shape[2]) > 1 and q.shape[2] <= 256


def launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    rows: int,
    extras: AttentionExtras,
) -> None:
    """The first `rows` rows. extras: what supports() takes."""
    kv_heads, block, size = cache.shape[2:]
    group = q.shape[1] // kv_heads
    pack = pack_rows(group)
    cut = plan_decode(q, cache, tables, cdiv(rows, pack), extras)
    cut = cut._replace(splits=max(1, min(cut.splits, MAX_PARTS // rows)))
    tile = max(16, next_power_of_2(pack * group))
    warps = max(cut.warps, tile // 8 if tile > 16 else 1)  # of registers for the sums
    pdl = not draft_decode_kernel.interpreted
    draft_decode_kernel(
        (rows * kv_heads * cut.splits, 1, 1),
        (
            q, cache, extras.scales, tables, extras.rows, contexts, out,
            *allocate_split_workspace(q, kv_heads, rows, cut, extras.counters), extras.sinks,
        ),
        (
            extras.scale * extras.k_scale, extras.softcap or 0.0, extras.v_scale,
            extras.window or 0, cut.splits, cut.min_chunk,
        ),
        (
            kv_heads, group, size, block, *CodeLayout.of(cache, extras.scales),
            q.stride(0), q.stride(1), tables.stride(0), pack, MAX_CHAIN,
            tile, max(16, next_power_of_2(size)),
            cut.tile_keys, cut.may_split, cut.stages, extras.window is not None,
            extras.softcap is not None, extras.sinks is not None, q.dtype == torch.float32, warps,
            pdl,
        ),
        warps=warps,
        pdl=pdl,
    )  # fmt: skip
