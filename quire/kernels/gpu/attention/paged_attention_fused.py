"""Fused decode attention: head norms, rotation, cache write and attention of a layer in one launch.

Every program norms and rotates its own queries (a few hundred values; cheaper than a launch). The
program whose range ends with the newest token does the same with that key, stores it, and starts
its softmax from it, so the newest token is not read back. Earlier steps stored all other keys, so
their first tile is loaded before the kernel waits for the previous one. That is correct as long
as a step begins with a kernel that waits for all before it (the runner's gather is launched without
pdl). Rounded where the separate ops round; quire.kernels.framework.lazy_fusion decides whether they
may be left out.

Axes: S sequences, K kv heads, G query heads of one KV head, D head size, B block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.kernels.gpu.attention.kv_codes import (
    CodeLayout,
    find_scales,
    magnitude_bits,
    scale_pointers,
    takes,
    to_codes,
)
from quire.kernels.gpu.attention.norm_rope_write import QKNorm
from quire.kernels.gpu.attention.online_softmax import (
    begin_sums,
    dot_qk,
    online_softmax_step,
    scale_and_softcap,
)
from quire.kernels.gpu.attention.paged_attention_decode import (
    attend_range,
    find_program,
    load_tile,
    split_range,
    store_or_merge,
)
from quire.kernels.gpu.attention.split_plan import (
    AttentionExtras,
    SplitPlan,
    allocate_split_workspace,
    plan_decode,
)
from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import launch_dependents, wait_for_previous_kernel
from quire.kernels.gpu.runtime.target import sm_count

MAX_SIZE = 256
"""Largest head: a program keeps the first keys and values in registers."""


@triton.jit
def _load_head_pairs(
    x_ptr,
    h,
    real,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads h of x unchanged, [M, D], and the same with each channel's pair in its place."""
    d = tl.arange(0, D)
    a = tl.load(x_ptr + h[:, None] * STRIDE + d[None, :], mask=real, other=0.0)
    partner = rotation_partner(d, D, R, INTERLEAVED)
    return a, tl.load(x_ptr + h[:, None] * STRIDE + partner[None, :], mask=real, other=0.0)


@triton.jit
def norm_and_rotate(x, partners, own, other, cos, turn, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads x, [M, D]: normalised, rounded, rotated, rounded.

    own, other: the norm's weights of a channel and of its pair, [D]; cos, and the signed sine turn:
    [1, D], or of each head [M, D].
    """
    dtype = x.dtype
    a = x.to(tl.float32)
    b = partners.to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        a = (a * shrink * own[None, :]).to(dtype).to(tl.float32)
        b = (b * shrink * other[None, :]).to(dtype).to(tl.float32)
    return (a * cos + b * turn).to(dtype)


@triton.jit
def rotation_partner(d, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channel that a channel is rotated with. Any, if it is not one of the first R."""
    if INTERLEAVED:
        partner = d ^ 1
    elif R == D:
        partner = (d + D // 2) % D
    else:
        partner = tl.where(d < R, (d + R // 2) % R, d)
    return partner


@triton.jit
def norm_weights(
    weight_ptr,
    offset,
    D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A norm's weights of each channel and of its pair."""
    d = tl.arange(0, D)
    own = tl.zeros([D], tl.float32)
    other = tl.zeros([D], tl.float32)
    if NORM:
        own = offset + tl.load(weight_ptr + d).to(tl.float32)
        partner = rotation_partner(d, D, R, INTERLEAVED)
        other = offset + tl.load(weight_ptr + partner).to(tl.float32)
    return own, other


@triton.jit
def _store_kv(x, given, where, scales, live, CODE: tl.constexpr, SCALES: tl.constexpr):
    """Store one head's key or value [1, D]; returns it as it will be read back, float32.

    scales: [1] pointers. The layer's own scale is not in what is returned.
    """
    scale = given
    if CODE != 0:
        scale = find_scales(magnitude_bits(x), given, scales, live, CODE, SCALES)
    stored = to_codes(x, scale, CODE).to(where.dtype.element_ty)
    tl.store(where, stored, mask=live[:, None])
    read = stored.to(x.dtype).to(tl.float32)
    if SCALES != 0:
        read = read * scale[:, None]
    return read


@kernel("scale", "softcap", "k_scale", "v_scale", "window", "splits", "q_eps", "k_eps",
        "q_offset", "k_offset")  # fmt: skip
def fused_decode_kernel(
    q_ptr,  # [S, K * G, D], the projection's output
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    positions_ptr,  # [S] int32
    angles_ptr,  # [P, R] fp32
    q_weight,  # [D], if NORM
    k_weight,
    slots_ptr,  # [S] int64
    cache_ptr,  # [N, 2, K, B, D], heads HEAD apart
    scales_ptr,  # [N, 2, K, B], if SCALES
    tables_ptr,  # [M, W]
    rows_ptr,  # [S], if HAS_ROWS
    contexts_ptr,  # [S]
    out_ptr,  # [S, K * G, D]
    part_ptr,
    stats_ptr,
    done_ptr,
    sinks_ptr,
    scale,
    softcap,
    k_scale,
    v_scale,
    window,
    splits,
    q_eps,
    k_eps,
    q_offset,
    k_offset,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # leading channels that are rotated; the rest turn by nothing
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
    K_H: tl.constexpr,
    V_T: tl.constexpr,
    V_H: tl.constexpr,
    W: tl.constexpr,
    GP: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    kh, s, split, _ = find_program(splits, K)
    t = s.to(tl.int64)
    if PDL:
        launch_dependents()
    # Before the wait: data of this step's first kernels, and keys of earlier steps.
    context = tl.load(contexts_ptr + s)
    position = tl.load(positions_ptr + s)
    slot = tl.load(slots_ptr + s)
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    table = tables_ptr + row.to(tl.int64) * W
    first, start, stop, used = split_range(
        context, window, split, splits, CHUNK, TILE, SPLIT, WINDOW
    )
    if split >= used:
        if PDL:
            wait_for_previous_kernel()
        return
    newest = (split == used - 1) & (context > 0)
    stop = tl.where(newest, stop - 1, stop)
    at = start + tl.arange(0, TILE)
    live = (at >= first) & (at < stop)
    k_tile, v_tile, k_scales, v_scales = load_tile(
        cache_ptr, scales_ptr, table, kh, at, live, K, D, B, HEAD, S_N, S_H, S_T, SCALES, D
    )
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    half = d // 2 if INTERLEAVED else d % (R // 2)
    angles = angles_ptr + position.to(tl.int64) * R + half
    if R == D:
        cos, sin = tl.load(angles), tl.load(angles + D // 2)
    else:
        cos = tl.load(angles, d < R, 1.0)
        sin = tl.load(angles + R // 2, d < R, 0.0)
    low = d % 2 == 0 if INTERLEAVED else d < R // 2
    turn = tl.where(low, -sin, sin)
    q_own, q_other = norm_weights(q_weight, q_offset, D, R, NORM, INTERLEAVED)
    k_own, k_other = norm_weights(k_weight, k_offset, D, R, NORM, INTERLEAVED)
    if PDL:
        wait_for_previous_kernel()
    one = kh + tl.arange(0, 1)
    mine = (one >= 0)[:, None] & newest
    q, q_twins = _load_head_pairs(
        q_ptr + t * Q_T, kh * G + g, (g < G)[:, None], Q_H, D, R, INTERLEAVED
    )
    k, k_partners = _load_head_pairs(k_ptr + t * K_T, one, mine, K_H, D, R, INTERLEAVED)
    v = tl.load(v_ptr + t * V_T + one[:, None] * V_H + d[None, :], mask=mine, other=0.0)
    q = norm_and_rotate(q, q_twins, q_own, q_other, cos[None, :], turn[None, :], q_eps, D, NORM)
    acc, total, top = begin_sums(GP, D)
    if newest:
        k = norm_and_rotate(
            k, k_partners, k_own, k_other, cos[None, :], turn[None, :], k_eps, D, NORM
        )
        where = cache_ptr + slot // B * (2 * K * HEAD) + slot % B * D + one[:, None] * HEAD
        where += d[None, :]
        scales = scale_pointers(scales_ptr, slot, one, B, S_N, S_H, S_T, SCALES)
        write = (one >= 0) & (slot >= 0)
        k_filed = _store_kv(k, k_scale, where, scales, write, CODE, SCALES)
        v_filed = _store_kv(v, v_scale, where + K * HEAD, scales + K * S_H, write, CODE, SCALES)
        top = scale_and_softcap(tl.sum(q.to(tl.float32) * k_filed, 1), scale, softcap, SOFTCAP)
        total += 1.0
        acc += v_filed
    dot = dot_qk(q, k_tile.to(q.dtype), k_scales, SCALES, IEEE)
    scores = scale_and_softcap(dot, scale, softcap, SOFTCAP)
    scores = tl.where(live[None, :], scores, float("-inf"))
    acc, total, top = online_softmax_step(
        scores, v_tile.to(q.dtype), v_scales, acc, total, top, SCALES, IEEE
    )
    acc, total, top = attend_range(
        acc, total, top, q, cache_ptr, scales_ptr, table, kh, first, start + TILE, stop,
        context - 1, top, top, scale, softcap, K, D, B, HEAD, S_N, S_H, S_T, SCALES, D, TILE,
        STAGES, SOFTCAP, False, 0, IEEE,
    )  # fmt: skip
    if CODE != 0 and not SCALES:
        acc = acc * v_scale
    store_or_merge(
        acc, total, top, part_ptr, stats_ptr, done_ptr, out_ptr, sinks_ptr, part_ptr, stats_ptr, 0,
        0, s, kh, split, used, (t * K + kh) * splits, K, G, D, GP, D, SPLIT, SINKS, 0,
    )  # fmt: skip


def parse_extras(
    q: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    rows: Tensor | None = None,
    decodes: int = 0,
    max_context: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    counters: Tensor | None = None,
    position_bias: Tensor | None = None,
    scales: Tensor | None = None,
    spans: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    drafts: bool = False,
    balanced: bool = False,
) -> tuple[AttentionExtras | None, bool]:
    """The arguments of paged_attention, and whether rows of one sequence follow one another.

    None: not one query per sequence, a bias, sequences that share keys, or balanced ranges. Rows
    with drafts are for paged_attention_drafts_fused: here a row would read keys that another
    program writes.
    """
    biased = alibi is not None or position_bias is not None or shared is not None
    if not decodes == q.shape[0] == contexts.shape[0] or biased or balanced:
        return None, drafts
    if drafts and rows is None:
        return None, drafts
    extras = AttentionExtras(
        scale, window, softcap, sinks, None, rows, max_context, k_scale, v_scale, counters,
        scales=scales,
    )  # fmt: skip
    return extras, drafts


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[QKNorm, QKNorm] | None,
    slots: Tensor,
    cache: Tensor,
) -> bool:
    """Whether one kernel can do it: heads of a power of two channels."""
    size = q.shape[2]
    if size > MAX_SIZE or q.shape[0] * k.shape[1] > sm_count(q.device):
        return False  # it needs many registers, which costs large batches more than a launch
    if size & (size - 1) or size < 16 or v.shape != k.shape:
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or not has_dense_heads(cache):
        return False
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        return False
    if not takes(cache, q.dtype):
        return False
    return slots.dtype == torch.int64 and slots.is_contiguous()


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norms: tuple[QKNorm, QKNorm] | None,
    slots: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    extras: AttentionExtras,
    measured: bool = False,
    cut: SplitPlan | None = None,
) -> None:
    """Fill out [S, H, D] and the cache. q, k: before their norms, if there are norms.

    measured: the scales of extras are measured, and not given.
    """
    rows, heads, size = q.shape
    kv_heads, block = cache.shape[2:4]
    group = heads // kv_heads
    layout = CodeLayout.of(cache, extras.scales)
    if not measured and layout.scales:
        layout = layout._replace(scales=1)
    how = extras.device(cache)
    k_scale, v_scale = how.k_scale, how.v_scale
    q_norm, k_norm = norms or (QKNorm(q, 0.0, 0.0), QKNorm(k, 0.0, 0.0))
    cut = cut or plan_decode(q, cache, tables, rows, how)
    pdl = not fused_decode_kernel.interpreted
    fused_decode_kernel(
        (rows * kv_heads * cut.splits, 1, 1),
        (
            q, k, v, positions, cos_sin, q_norm.weight, k_norm.weight, slots, cache, how.scales,
            tables, how.rows, contexts, out, *allocate_split_workspace(q, kv_heads, rows, cut,
            how.counters),
            how.sinks,
        ),
        (
            how.scale * k_scale, how.softcap or 0.0, k_scale, v_scale, how.window or 0, cut.splits,
            q_norm.eps, k_norm.eps, q_norm.offset, k_norm.offset,
        ),
        (
            kv_heads, group, size, cos_sin.shape[1], block, *layout,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            tables.stride(0), max(16, next_power_of_2(group)), cut.tile_keys, cut.min_chunk,
            cut.may_split, cut.stages, norms is not None, interleaved, how.rows is not None,
            how.window is not None, how.softcap is not None, how.sinks is not None,
            q.dtype == torch.float32, pdl,
        ),
        warps=cut.warps,
        pdl=pdl,
    )  # fmt: skip
