"""MLA decode on Hopper for many heads: a loader warp and two warpgroups that multiply.

    grid (tiles of 64 heads, sequences, splits), as in mla_decode, which merges the splits

With 128 heads a latent of 1,152 bytes is multiplied 278,000 times: the matrix units are the limit,
and must not wait for memory. One thread of the loader makes the bulk copy engine fetch whole blocks
of the cache while both warpgroups multiply the latents before them; they share the 64 rows, each
has half of the keys of a product and half of the channels of the sums.

Axes: as in quire.kernels.mla_attention; N latents at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.gpu.runtime.fast_launch import kernel

LOWEST = gl.constexpr(-1.0e30)
ROWS = gl.constexpr(64)
LINE = gl.constexpr(64)  # channels in a line of shared memory (128 bytes)
L = gl.constexpr(512)
R = gl.constexpr(64)


@gluon.jit
def _load(cache_tiles, k_smem, r_smem, full, empty, table, first, last, count,
          B: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The loader: tiles of N latents in order, as stages come free."""
    NB: gl.constexpr = N // B
    for j in range(count):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), (j // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, N * (L + R) * 2)
        k_tile = k_smem.index(stage)._reinterpret(
            k_smem.dtype, [NB * (L // LINE), B, LINE], cache_tiles.layout
        )
        r_tile = r_smem.index(stage)._reinterpret(r_smem.dtype, [NB, B, LINE], cache_tiles.layout)
        for i in gl.static_range(NB):
            row = gl.load(table + gl.minimum(first + j * NB + i, last)) * B
            for h in gl.static_range(L // LINE):
                tma.async_copy_global_to_shared(
                    cache_tiles, [row, h * LINE], bar, k_tile.index(h * NB + i)
                )
            tma.async_copy_global_to_shared(cache_tiles, [row, L], bar, r_tile.index(i))


@gluon.jit
def _zero_tail(tile, from_row, N: gl.constexpr):
    """Zero a tile's compressed parts from a row on: it is not written there, and 0 * NaN is NaN."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    parts = tile._reinterpret(tile.dtype, [L // LINE, N, LINE], gl.NVMMASharedLayout(128, 16))
    r = gl.arange(0, N, gl.SliceLayout(1, lines))
    for h in gl.static_range(L // LINE):
        part = parts.index(h)
        x = part.load(lines)
        part.store(gl.where((r < from_row)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(q_ptr, rope_ptr, out_ptr, part_ptr, weight_ptr, q_smem, t_smem, p_smem, k_smem, r_smem,
            full, empty, s, x, splits, head, start, end, count, scale,
            H: gl.constexpr, Q_ROW: gl.constexpr, Q_HEAD: gl.constexpr, ROPE_ROW: gl.constexpr,
            ROPE_HEAD: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
            WHOLE: gl.constexpr):  # fmt: skip
    """Both warpgroups: 64 heads against all tiles."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    THIN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    h = head + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    c = gl.arange(0, L, gl.SliceLayout(0, WIDE))
    q_at = q_ptr + s * Q_ROW + h[:, None] * Q_HEAD + c[None, :]
    q_smem.store(gl.load(q_at, mask=(h < H)[:, None], other=0.0))
    h = head + gl.arange(0, ROWS, gl.SliceLayout(1, THIN))
    r = gl.arange(0, R, gl.SliceLayout(0, THIN))
    t_at = rope_ptr + s * ROPE_ROW + h[:, None] * ROPE_HEAD + r[None, :]
    t_smem.store(gl.load(t_at, mask=(h < H)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    n = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    best = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, L], gl.float32, O_LAYOUT)
    for j in range(count):
        stage = j % STAGES
        mbarrier.wait(full.index(stage), j // STAGES & 1)
        zero = gl.zeros([ROWS, N], gl.float32, S_LAYOUT)
        turned = r_smem.index(stage).permute((1, 0))
        scores = warpgroup_mma(t_smem, turned, zero, use_acc=False, is_async=True)
        keys = k_smem.index(stage).permute((1, 0))
        scores = warpgroup_mma(q_smem, keys, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        at = start + j * N + n
        scores = gl.where((at < end)[None, :], scores * scale, float("-inf"))
        higher = gl.maximum(best, gl.max(scores, 1))
        shrink = gl.exp2(best - higher)
        p = gl.exp2(scores - higher[:, None])
        total = total * shrink + gl.sum(p, 1)
        best = higher
        p_smem.store(p.to(p_smem.dtype))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if start + (j + 1) * N > end:
            _zero_tail(k_smem.index(stage), end - (start + j * N), N)
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(p_smem, k_smem.index(stage), acc)
        mbarrier.arrive(empty.index(stage), count=1)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))[:, None]

    h = head + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
    c = gl.arange(0, L, gl.SliceLayout(0, O_LAYOUT))
    real = (h < H)[:, None]
    if WHOLE:
        to = out_ptr + (s * H + h[:, None]) * L + c[None, :]
        gl.store(to, acc.to(out_ptr.dtype.element_ty), mask=real)
    else:
        to = part_ptr + ((s * splits + x) * H + h[:, None]) * L + c[None, :]
        gl.store(to, acc, mask=real)
        h = head + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        to = weight_ptr + (s * splits + x) * H + h
        gl.store(to, best + gl.log2(total), mask=h < H)


@kernel("scale", "splits", jit=gluon.jit)
def mla_decode_hopper_kernel(
    q_ptr,  # [T, H, L]
    rope_ptr,  # [T, H, R]
    tables_ptr,
    contexts_ptr,
    rows_ptr,
    out_ptr,  # [T, H, L]
    part_ptr,  # [T, X, H, L] float32 where there are splits
    weight_ptr,  # [T, X, H] float32
    cache_tiles,  # descriptor of the cache as [N * B, L + R], tiles [B, 64]
    scale,
    splits,
    H: gl.constexpr,
    Q_ROW: gl.constexpr,
    Q_HEAD: gl.constexpr,
    ROPE_ROW: gl.constexpr,
    ROPE_HEAD: gl.constexpr,
    TABLE_ROW: gl.constexpr,
    B: gl.constexpr,
    HAS_ROWS: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    LEAST: gl.constexpr,
):
    head = gl.program_id(0) * ROWS
    s = gl.program_id(1).to(gl.int64)
    x = gl.program_id(2)
    context = gl.load(contexts_ptr + s)
    share = gl.cdiv(gl.maximum(gl.cdiv(context, splits), LEAST), N) * N
    start = x * share
    end = gl.minimum(start + share, context)
    if start < end:
        row = s
        if HAS_ROWS:
            row = gl.load(rows_ptr + s).to(gl.int64)
        dtype: gl.constexpr = q_ptr.dtype.element_ty
        lines: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        q_smem = gl.allocate_shared_memory(dtype, [ROWS, L], lines)
        t_smem = gl.allocate_shared_memory(dtype, [ROWS, R], lines)
        p_smem = gl.allocate_shared_memory(dtype, [ROWS, N], lines)
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, N, L], lines)
        r_smem = gl.allocate_shared_memory(dtype, [STAGES, N, R], lines)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        fence_async_shared()
        count = gl.cdiv(end - start, N)
        table = tables_ptr + row * TABLE_ROW
        gl.warp_specialize(
            [
                (_attend, (q_ptr, rope_ptr, out_ptr, part_ptr, weight_ptr, q_smem, t_smem, p_smem,
                           k_smem, r_smem, full, empty, s, x, splits, head, start, end, count,
                           scale, H, Q_ROW, Q_HEAD, ROPE_ROW, ROPE_HEAD, N, STAGES, WHOLE)),
                (_load, (cache_tiles, k_smem, r_smem, full, empty, table, start // B,
                         (context - 1) // B, count, B, N, STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif WHOLE:
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
        h = head + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
        c = gl.arange(0, L, gl.SliceLayout(0, flat))
        nothing = gl.zeros([ROWS, L], out_ptr.dtype.element_ty, flat)
        gl.store(out_ptr + (s * H + h[:, None]) * L + c[None, :], nothing, mask=(h < H)[:, None])


def supports(q: Tensor, q_rope: Tensor, cache: Tensor) -> bool:
    """Whether this kernel serves such rows; the device must be a Hopper."""
    kind = q.dtype == cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    sizes = q.shape[2] == 512 and q_rope.shape[2] == 64 and cache.shape[3] in (16, 32, 64)
    return kind and sizes and q.shape[1] > 32


def launch(
    out: Tensor,
    part: Tensor | None,
    weight: Tensor | None,
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    rows: Tensor | None,
    log_scale: float,
    count: int,
    splits: int,
    latents: int,
    least: int,
    stages: int = 2,
) -> None:
    """As the kernel of mla_decode: `out`, or parts of it if there are several splits."""
    blocks, block, size = cache.shape[0], cache.shape[3], cache.shape[4]
    lines = gl.NVMMASharedLayout(128, 16)
    tiles = TensorDescriptor(cache, [blocks * block, size], [size, 1], [block, 64], lines)
    mla_decode_hopper_kernel(
        (-(-q.shape[1] // 64), count, splits),
        (q, q_rope, tables, contexts, rows, out, part, weight),
        (log_scale, splits),
        (
            q.shape[1], q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
            tables.stride(0), block, rows is not None, latents, stages, splits == 1, least,
        ),
        warps=8,
        tiles=(tiles,),
    )  # fmt: skip
