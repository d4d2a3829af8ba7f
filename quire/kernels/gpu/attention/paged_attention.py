"""Dispatcher of paged attention on the GPU: picks the kernels of a step by shape and device.

    paged_attention_decode           sequences of one query, long contexts split among programs
    paged_attention_shared           leading keys that sequences of one query have in common
    paged_attention_drafts           the same for rows of one sequence that follow one another
    paged_attention_fused            single queries, with norms, rotation and cache write in it
    paged_attention_drafts_fused     the same for rows of one sequence
    paged_attention_prefill          sequences of several queries
    paged_attention_prefill_hopper   the same on Hopper, with Gluon
    paged_attention_prefill_loader   its loader

Nothing else imports these modules. How a launch is split is in split_plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.formats.kv_cache import has_dense_heads
from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.kernels.gpu.attention import paged_attention_drafts as packed
from quire.kernels.gpu.attention import paged_attention_drafts_fused as packed_fused
from quire.kernels.gpu.attention import paged_attention_fused as fused
from quire.kernels.gpu.attention.kv_codes import CodeLayout
from quire.kernels.gpu.attention.paged_attention_decode import decode_kernel
from quire.kernels.gpu.attention.paged_attention_prefill import prefill_kernel
from quire.kernels.gpu.attention.paged_attention_shared import shared_prefix_kernel
from quire.kernels.gpu.attention.split_plan import (
    MIN_SPLIT_KEYS,
    AttentionExtras,
    PrefillTiles,
    SplitPlan,
    allocate_split_workspace,
    plan_decode,
    plan_prefill_splits,
    plan_prefill_tiles,
    plan_shared,
)
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.target import gpu_target, sm_count

_MAX_SIZE, _MAX_GROUP = 512, 128
_MAX_WIDE_GROUP = 64
"""Query heads of a KV head, if heads are larger than 256: more do not fit in shared memory."""

PREFILL_RESIDENT_PER_SM = 2
"""Programs of prefill_kernel that a multiprocessor holds at once."""


def outputs(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    *_: Any,
    **__: Any,
) -> Tensor:
    """A new [T, H, D]. NotImplemented for layouts the kernels do not read."""
    strided = has_dense_heads(cache) and tables.stride(-1) == 1 and q.stride(2) == 1
    group = _MAX_GROUP if q.shape[2] <= 256 else _MAX_WIDE_GROUP
    if not strided or q.shape[2] > _MAX_SIZE or q.shape[1] > group * cache.shape[2]:
        return NotImplemented
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def launch(
    outs: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
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
) -> None:
    """Start the kernels of one step."""
    if window or alibi is not None or position_bias is not None:
        shared = None
    extras = AttentionExtras(
        scale, window, softcap, sinks, alibi, rows, max_context, k_scale, v_scale, counters,
        position_bias, scales, spans, shared, balanced and not drafts,
    ).device(cache)  # fmt: skip
    if decodes and drafts and packed.supports(q, cache, extras):
        packed.launch(outs, q, cache, tables, contexts, decodes, extras)
    elif decodes:
        cut = plan_decode(q, cache, tables, decodes, extras)
        decode(outs, q, cache, tables, contexts, decodes, extras, cut)
    if contexts.shape[0] > decodes:
        hopper = _prefill_hopper_module(q.device)
        if hopper is not None and hopper.supports(q, cache, extras):
            hopper.launch(outs, q, cache, tables, q_starts, contexts, decodes, extras)
            return
        tiles = plan_prefill_tiles(q, cache.shape[2])
        prefill(outs, q, k, v, cache, tables, q_starts, contexts, decodes, extras, tiles)


def launch_fused(
    out: Tensor,
    q: Tensor,
    qkv: Any,
    slots: Tensor,
    measured: bool,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    *features: Any,
    **named: Any,
) -> bool:
    """Start attention with the norms, rotation and cache write before it, if one kernel can.

    qkv: q, k, v, positions, cos_sin, interleaved, norms, as they are before all of that.
    measured: the write measures scales of tokens.
    features, named: the arguments of paged_attention after contexts.
    """
    extras, drafts = fused.parse_extras(q, contexts, *features, **named)
    q_raw, k, v, positions, cos_sin, interleaved, norms = qkv
    body = packed_fused if drafts else fused
    if extras is None or not body.supports(
        q_raw, k, v, positions, cos_sin, interleaved, norms, slots, cache
    ):
        return False
    body.launch(
        out, q_raw, k, v, positions, cos_sin, interleaved, norms, slots, cache, tables, contexts,
        extras, measured,
    )  # fmt: skip
    return True


def _prefill_hopper_module(device: torch.device) -> Any:
    """The Hopper prefill kernel, if the device and Triton's version of Gluon fit."""
    if gpu_target(device).capability != (9, 0) or not triton.__version__.startswith("3.6."):
        return None
    return import_module("quire.kernels.gpu.attention.paged_attention_prefill_hopper")


def decode(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    rows: int,
    extras: AttentionExtras,
    cut: SplitPlan,
) -> None:
    """The first `rows` sequences, which have one query each."""
    kv_heads, block, size = cache.shape[2:]
    group = q.shape[1] // kv_heads
    pdl = not decode_kernel.interpreted
    parts = _attend_shared(q, cache, tables, rows, extras)
    decode_kernel(
        (cut.programs(rows) * kv_heads, 1, 1),
        (
            q, cache, extras.scales, tables, extras.rows, contexts, out,
            *allocate_split_workspace(q, kv_heads, rows, cut, extras.counters), extras.sinks,
            extras.alibi, extras.position_bias, parts.lengths, parts.out, parts.stats,
        ),
        (
            extras.scale * extras.k_scale, extras.softcap or 0.0, extras.v_scale,
            extras.window or 0, cut.splits, cut.min_chunk, parts.splits,
        ),
        (
            kv_heads, group, size, block, *CodeLayout.of(cache, extras.scales),
            q.stride(0), q.stride(1), tables.stride(0),
            max(16, next_power_of_2(group)), max(16, next_power_of_2(size)),
            cut.tile_keys, cut.may_split, cut.stages, extras.rows is not None,
            extras.window is not None, extras.softcap is not None, extras.sinks is not None,
            extras.alibi is not None, extras.reach, parts.chunk, cut.balanced,
            q.dtype == torch.float32, pdl,
        ),
        warps=cut.warps,
        pdl=pdl,
    )  # fmt: skip


class _SharedParts(NamedTuple):
    """What sequences have of leading keys that they share. chunk: of the shortest range."""

    lengths: Tensor | None = None  # [S] int32
    out: Tensor | None = None  # [S, K, splits, G, D] fp32
    stats: Tensor | None = None  # [S, K, splits, 2, G] fp32
    splits: int = 0
    chunk: int = 0


def _attend_shared(
    q: Tensor, cache: Tensor, tables: Tensor, rows: int, extras: AttentionExtras
) -> _SharedParts:
    """Attend to the leading keys that sequences share."""
    shared = extras.shared
    if shared is None:
        return _SharedParts()
    kv_heads, block, size = cache.shape[2:]
    plan = plan_shared(q, kv_heads, shared)
    cells = rows * q.shape[1] * plan.splits
    part = torch.empty(cells * size, dtype=torch.float32, device=q.device)
    stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
    pdl = not shared_prefix_kernel.interpreted
    tiles = shared.tiles.shape[0]
    shared_prefix_kernel(
        (min(tiles * kv_heads * plan.splits, sm_count(q.device)), 1, 1),
        (
            q, cache, extras.scales, tables, extras.rows, shared.members, shared.tiles, part, stats,
        ),
        (extras.scale * extras.k_scale, extras.softcap or 0.0, extras.v_scale, plan.splits, tiles),
        (
            kv_heads, q.shape[1] // kv_heads, size, block, *CodeLayout.of(cache, extras.scales),
            q.stride(0), q.stride(1), tables.stride(0), plan.rows, max(16, next_power_of_2(size)),
            plan.tile_keys, plan.chunk, plan.stages, extras.rows is not None,
            extras.softcap is not None, q.dtype == torch.float32, pdl,
        ),
        warps=plan.warps,
        pdl=pdl,
    )  # fmt: skip
    return _SharedParts(shared.lengths, part, stats, plan.splits, plan.chunk)


def prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    decodes: int,
    extras: AttentionExtras,
    tiles: PrefillTiles,
) -> None:
    """The sequences after the first `decodes`, of any number of queries."""
    kv_heads, block, size = cache.shape[2:]
    group, padded = q.shape[1] // kv_heads, max(16, next_power_of_2(size))
    if extras.spans is not None or not _reads_new_kv(q, k, v, cache):
        k = v = None
    fresh = k is not None and v is not None
    tma = fresh and tiles.tma and size == padded and extras.window is None
    queries = tiles.rows // group
    sequences = contexts.shape[0] - decodes
    tokens = q.shape[0] - decodes
    count = tokens // queries + sequences
    longest = tables.shape[1] * block if extras.window is None else 0
    programs = PREFILL_RESIDENT_PER_SM * sm_count(q.device)
    shares = plan_prefill_splits(q, kv_heads, tokens, count, tiles.rows, programs, extras, longest)
    prefill_kernel(
        (count * kv_heads * shares.splits, 1, 1),
        (
            q, k, v, cache, extras.scales, tables, extras.rows, q_starts, contexts, extras.spans,
            out, extras.sinks, extras.alibi, extras.position_bias, shares.partial_out,
            shares.partial_stats, shares.counters,
        ),
        (
            extras.scale * extras.k_scale, extras.softcap or 0.0, extras.v_scale,
            extras.window or 0, decodes, sequences, shares.splits,
        ),
        (
            kv_heads, group, size, block, *CodeLayout.of(cache, extras.scales),
            q.stride(0), q.stride(1),
            0 if k is None else k.stride(0), 0 if v is None else v.stride(0), tables.stride(0),
            tiles.rows, queries, padded, tiles.tile_keys, MIN_SPLIT_KEYS, shares.may_split,
            tiles.stages, fresh,
            tma,
            extras.rows is not None, extras.window is not None, extras.softcap is not None,
            extras.sinks is not None, extras.alibi is not None, extras.reach,
            q.dtype == torch.float32,
        ),
        warps=tiles.warps,
        tiles=(_tma_descriptor(k, tiles.tile_keys if tma else 0), _tma_descriptor(v, tiles.tile_keys
        if tma else 0)),
    )  # fmt: skip


def _reads_new_kv(q: Tensor, k: Tensor | None, v: Tensor | None, cache: Tensor) -> bool:
    """Whether k and v can be read from the projection's output, and equal the cached values."""
    if k is None or v is None or not cache.dtype == k.dtype == q.dtype:
        return False
    packed = (k.shape[2], 1)
    return k.stride()[1:] == packed and v.stride()[1:] == packed


def _tma_descriptor(x: Tensor | None, rows: int) -> TensorDescriptor | None:
    """[T, K, D] as a 2-D tensor the bulk copy engine reads `rows` tokens of one head from."""
    if x is None or not rows:
        return None
    tokens, heads, size = x.shape
    return TensorDescriptor(x, [tokens, heads * size], [x.stride(0), 1], [rows, size])
