"""Shared prefix kernel: attention of decoding sequences to leading keys that they have in common.

Sequences with the same leading blocks would each read the same keys. Here a program holds the
queries of several of them and reads a range of those keys once; it stores a part per sequence.
paged_attention_decode then begins behind the shared keys, and merges these parts with its own.

A captured step has room for many more tiles than it uses: programs are as many as run at once, and
go from one range to the next, since each that only found its tile unused took a microsecond.

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size, N tiles.
"""

from __future__ import annotations

import triton.language as tl

from quire.kernels.gpu.attention.online_softmax import (
    begin_sums,
)
from quire.kernels.gpu.attention.paged_attention_decode import attend_range
from quire.kernels.gpu.attention.paged_attention_merge import shared_range
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel


@kernel("scale", "softcap", "v_scale", "splits", "tiles")
def shared_prefix_kernel(
    q_ptr,  # [S, K * G, D]
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S] row of the table, if HAS_ROWS
    members_ptr,  # [S]
    tiles_ptr,  # [N, 3]
    part_ptr,  # [S, K, splits, G, D] fp32
    stats_ptr,  # [S, K, splits, 2, G] fp32: maximum, sum
    scale,
    softcap,
    v_scale,
    splits,
    tiles,
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
    W: tl.constexpr,
    M: tl.constexpr,  # rows of a tile: sequences times G, a power of two
    DP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    member = m // G
    g = m % G
    item = tl.program_id(0)
    items = tiles * K * splits
    while item < items:
        kh = item % K
        split = item // K % splits
        tile = tiles_ptr + 3 * (item // (K * splits))
        first = tl.load(tile)
        count = tl.load(tile + 1)
        tokens = tl.load(tile + 2)
        size, used = shared_range(tokens, splits, CHUNK)
        if split < used:
            here = member < count
            real = here[:, None] & (d < D)[None, :]
            s = tl.load(members_ptr + first + member, mask=here, other=0).to(tl.int64)
            row = tl.load(members_ptr + first)
            if HAS_ROWS:
                row = tl.load(rows_ptr + row)
            table = tables_ptr + row.to(tl.int64) * W
            where = q_ptr + (s * Q_T + (kh * G + g) * Q_H)[:, None] + d[None, :]
            q = tl.load(where, mask=real, other=0.0)
            acc, total, top = begin_sums(M, DP)
            start = split * size
            stop = tl.minimum(start + size, tokens)
            acc, total, top = attend_range(
                acc, total, top, q, cache_ptr, scales_ptr, table, kh, 0, start, stop, 0, top, top,
                scale, softcap, K, D, B, HEAD, S_N, S_H, S_T, SCALES, DP, TILE, STAGES, SOFTCAP,
                False, 0, IEEE,
            )  # fmt: skip
            if CODE != 0 and not SCALES:
                acc = acc * v_scale
            mine = (s * K + kh) * splits + split
            tl.store(part_ptr + (mine * (G * D) + g * D)[:, None] + d[None, :], acc, mask=real)
            tl.store(stats_ptr + mine * (2 * G) + g, top, mask=here)
            tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=here)
        item = tl.where(count > 0, item + tl.num_programs(0), items)  # those in use come first
