"""How attention's launches are cut into programs, from what the host knows. No kernels here.

The host never knows the contexts of a captured step: it fixes how many stretches a context may be
cut into, and the kernel decides on the device how long they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

CROWD = 8192
"""Programs a decode launch aims at: enough waves over the card that the last one is cheap."""

MOST_SPLITS = 32


class Extras(NamedTuple):
    """What a layer and a step may ask for beyond plain causal attention."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    rows: Tensor | None = None
    max_context: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    counters: Tensor | None = None

    def on(self, cache: Tensor) -> Extras:
        """The same without scales, if the cache is not of eight bits."""
        if cache.dtype == torch.float8_e4m3fn:
            return self
        return self._replace(k_scale=1.0, v_scale=1.0)


class Cut(NamedTuple):
    """A decode launch: keys a turn, keys in the least stretch, stretches at most, how it is run."""

    tile: int
    chunk: int
    warps: int
    stages: int
    splits: int


class Tiles(NamedTuple):
    """A prefill launch: rows (queries times heads), keys a turn, how it is run.

    tma: the bulk copy engine brings the keys and values.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    tma: bool


def decode_cut(q: Tensor, cache: Tensor, tables: Tensor, rows: int, extras: Extras) -> Cut:
    """Sizes for one query a sequence. In float32 they are the same for every number of rows."""
    kv_heads, block, size = cache.shape[2:]
    exact = q.dtype == torch.float32
    if exact:
        tile, chunk, warps, stages = (32 if size <= 128 else 16), 64, 4, 3
    else:
        tile, chunk, warps, stages = (64 if size <= 128 else 32), 128, 4, 5
    if q.shape[1] // kv_heads > 32:
        warps = 8
    most = MOST_SPLITS if exact else min(max(CROWD // (rows * kv_heads), 1), MOST_SPLITS)
    bound = min(extras.max_context or 1 << 30, tables.shape[1] * block)
    return Cut(tile, chunk, warps, stages, max(1, min(most, -(-bound // chunk))))


def prefill_tiles(q: Tensor, kv_heads: int) -> Tiles:
    """Sizes for several queries a sequence."""
    group, wide = q.shape[1] // kv_heads, q.shape[2] > 128
    if q.dtype == torch.float32:
        return Tiles(max(16 if wide else 32, triton.next_power_of_2(group)), 16 if wide else 32,
                     4, 1, False)  # fmt: skip
    rows = max(128, triton.next_power_of_2(group))
    return Tiles(rows, 64 if wide else 128, 8, 2, not wide)


def workspace(
    q: Tensor, kv_heads: int, rows: int, splits: int, counters: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(parts, their maxima and sums, counters) of a split launch."""
    if splits == 1:
        return None, None, None
    cells = rows * q.shape[1] * splits
    part = torch.empty(cells * q.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
    if counters is None or counters.numel() < rows * kv_heads:
        counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
    return part, stats, counters
