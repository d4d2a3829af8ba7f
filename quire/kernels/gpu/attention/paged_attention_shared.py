"""Shared prefix kernel: attention of decoding sequences to leading keys that they have in common.

Sequences with the same leading blocks would each read the same keys. Here a program holds the
queries of several of them and reads a range of those keys once; it stores a part per sequence.
paged_attention_decode then begins behind the shared keys, and merges these parts with its own.

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size, N tiles.
"""

from __future__ import annotations

import triton.language as tl

from quire.kernels.gpu.attention.online_softmax import (
    begin_sums,
)
from quire.kernels.gpu.attention.paged_attention_decode import attend_range, find_program
from quire.kernels.gpu.attention.paged_attention_merge import shared_range
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel


@kernel("scale", "softcap", "v_scale", "splits")
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
    kh, tile, split, _ = find_program(splits, K)
    if PDL:
        launch_dependents()
        wait_for_previous_kernel()
    first = tl.load(tiles_ptr + 3 * tile)
    count = tl.load(tiles_ptr + 3 * tile + 1)
    tokens = tl.load(tiles_ptr + 3 * tile + 2)
    size, used = shared_range(tokens, splits, CHUNK)
    if (count == 0) | (split >= used):
        return
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    member = m // G
    g = m % G
    real = (member < count)[:, None] & (d < D)[None, :]
    s = tl.load(members_ptr + first + member, mask=member < count, other=0).to(tl.int64)
    row = tl.load(members_ptr + first)
    if HAS_ROWS:
        row = tl.load(rows_ptr + row)
    where = q_ptr + (s * Q_T + (kh * G + g) * Q_H)[:, None] + d[None, :]
    q = tl.load(where, mask=real, other=0.0)
    acc, total, top = begin_sums(M, DP)
    start = split * size
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, scales_ptr, tables_ptr + row.to(tl.int64) * W, kh, 0, start,
        tl.minimum(start + size, tokens), 0, top, top, scale, softcap, K, D, B, HEAD, S_N, S_H, S_T,
        SCALES, DP, TILE, STAGES, SOFTCAP, False, 0, IEEE,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    mine = (s * K + kh) * splits + split
    tl.store(part_ptr + (mine * (G * D) + g * D)[:, None] + d[None, :], acc, mask=real)
    tl.store(stats_ptr + mine * (2 * G) + g, top, mask=member < count)
    tl.store(stats_ptr + mine * (2 * G) + G + g, total, mask=member < count)
