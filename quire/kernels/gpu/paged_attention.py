"""The GPU body of paged_attention: one launch for single queries, one for the rest of the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.gpu.paged_attention_decode import decode_kernel
from quire.kernels.gpu.paged_attention_prefill import prefill_kernel

CROWD = 8192
"""Programs a decode launch aims at: enough waves over the card that the last one is cheap."""

MOST_SPLITS = 32


class Shape(NamedTuple):
    """How a decode launch is cut: keys a turn, keys in the least stretch, and how it is run."""

    tile: int
    chunk: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How a prefill launch is cut: rows (queries times heads), keys a turn, and how it is run."""

    rows: int
    tile: int
    warps: int
    stages: int
    tma: bool


def decode_shape(q: Tensor) -> Shape:
    """Sizes for one query a sequence."""
    size = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:
        return Shape(32, 64, 4, 2)
    if size > 128:
        return Shape(32, 64, 4, 3)
    return Shape(64, 64, 4, 3)


def prefill_tiles(q: Tensor, group: int) -> Tiles:
    """Sizes for several queries a sequence."""
    size = triton.next_power_of_2(q.shape[2])
    if q.dtype == torch.float32:
        return Tiles(max(32, triton.next_power_of_2(group)), 32, 4, 1, False)
    if size > 128:
        return Tiles(128, 64, 8, 2, True)
    return Tiles(128, 128, 8, 2, True)


def splits_for(rows: int, kv_heads: int, max_context: int, shape: Shape, exact: bool) -> int:
    """Stretches a context is cut into at most. `exact`: the same for every number of rows."""
    most = MOST_SPLITS if exact else min(max(CROWD // (rows * kv_heads), 1), MOST_SPLITS)
    return max(1, min(most, -(-max_context // shape.chunk)))


def outputs(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    **features: Any,
) -> Tensor:
    """A new [T, H, D]. NotImplemented for layouts the kernels do not read."""
    contiguous = cache.is_contiguous() and tables.stride(-1) == 1 and q.stride(2) == 1
    if not contiguous or q.shape[2] > 512 or q.shape[1] // cache.shape[2] > 128:
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
    shape: Shape | None = None,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> None:
    """Start the kernels of one step."""
    sequences = contexts.shape[0]
    if cache.dtype != torch.float8_e4m3fn:
        k_scale = v_scale = 1.0
    kv_heads, block, size = cache.shape[2:]
    group = q.shape[1] // kv_heads
    flags = {
        "K": kv_heads, "G": group, "D": size, "B": block,
        "DP": max(16, triton.next_power_of_2(size)),
        "HAS_ROWS": rows is not None, "WINDOW": window is not None,
        "SOFTCAP": softcap is not None, "SINKS": sinks is not None, "ALIBI": alibi is not None,
        "V_SCALE": v_scale != 1.0, "IEEE": q.dtype == torch.float32,
    }  # fmt: skip
    if decodes:
        shape = shape or decode_shape(q)
        bound = max_context or tables.shape[1] * block
        if splits is None:
            splits = splits_for(decodes, kv_heads, bound, shape, q.dtype == torch.float32)
        part = stats = None
        if splits > 1:
            cells = decodes * kv_heads * splits * group
            part = torch.empty(cells * size, dtype=torch.float32, device=q.device)
            stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
            if counters is None or counters.numel() < decodes * kv_heads:
                counters = torch.zeros(decodes * kv_heads, dtype=torch.int32, device=q.device)
        decode_kernel(
            (decodes * kv_heads * splits, 1, 1),
            (q, cache, tables, rows, contexts, outs, part, stats, counters, sinks, alibi),
            (scale * k_scale, softcap or 0.0, v_scale, window or 0, splits),
            (
                kv_heads, group, size, block, q.stride(0), q.stride(1), tables.stride(0),
                max(16, triton.next_power_of_2(group)), flags["DP"], shape.tile, shape.chunk,
                splits > 1, shape.stages, rows is not None, window is not None,
                softcap is not None, sinks is not None, alibi is not None, v_scale != 1.0,
                q.dtype == torch.float32,
            ),
            warps=shape.warps,
        )  # fmt: skip
    if sequences > decodes:
        tiles = tiles or prefill_tiles(q, group)
        fresh = k is not None and v is not None and cache.dtype == k.dtype == q.dtype
        fresh = fresh and k.stride(2) == 1 and v.stride(2) == 1
        fresh = fresh and k.stride(1) == size and v.stride(1) == size
        tma = fresh and tiles.tma and size == flags["DP"] and window is None
        queries = tiles.rows // group
        count = (q.shape[0] - decodes) // queries + sequences - decodes
        prefill_kernel[(count * kv_heads,)](
            q, k if fresh else None, v if fresh else None,
            _tiles_of(k, tiles.tile) if tma else None, _tiles_of(v, tiles.tile) if tma else None,
            cache, tables, rows, q_starts, contexts, outs, sinks, alibi,
            q.stride(0), q.stride(1), k.stride(0) if fresh else 0, v.stride(0) if fresh else 0,
            tables.stride(0), scale * k_scale, softcap or 0.0, v_scale, window or 0,
            decodes, sequences - decodes,
            M=tiles.rows, QUERIES=queries, TILE=tiles.tile, STAGES=tiles.stages, FRESH=fresh,
            TMA=tma, num_warps=tiles.warps, **flags,
        )  # fmt: skip


def _tiles_of(x: Tensor, rows: int) -> TensorDescriptor:
    """[T, K, D] as a 2-D tensor the bulk copy engine reads `rows` tokens of one head from."""
    tokens, heads, size = x.shape
    return TensorDescriptor(x, [tokens, heads * size], [x.stride(0), 1], [rows, size])
