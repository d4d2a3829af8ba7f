"""How attention's launches are cut into programs, from what the host knows. No kernels here.

The host never knows the contexts of a captured step: it fixes how many stretches a context may be
cut into, and the kernel decides on the device how long they are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.gpu.sizes import next_power_of_2

MOST_SPLITS = 32
"""Stretches of a context at most: what the last program merges one after the other."""

RESIDENT = 3
"""Programs of a decode kernel that a multiprocessor holds at once (by shared memory)."""


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
    """Sizes for one query a sequence.

    Few programs: split so that all run at once, none twice. Many: split long contexts only, so
    that the longest does not outlast the rest. In float32 the same for every number of rows.
    """
    kv_heads, block, size = cache.shape[2:]
    programs = rows * kv_heads
    # two warps: fewer wait for one another, and still every program copies 64 KiB ahead
    warps = 8 if q.shape[1] // kv_heads > 32 else 2 if q.dtype != torch.float32 else 4
    if q.dtype == torch.float32:
        tile, stages, chunk, splits = (32 if size <= 128 else 16), 3, 64, MOST_SPLITS
    else:
        tile, stages = (64 if size <= 128 else 32), 5
        room = at_once(q.device) // programs
        if room:
            chunk, splits = 64, min(room, MOST_SPLITS)
        else:
            chunk, splits = 1024, 4 if programs <= 2048 else 2
    bound = min(extras.max_context or 1 << 30, tables.shape[1] * block)
    return Cut(tile, chunk, warps, stages, max(1, min(splits, -(-bound // chunk))))


@functools.cache
def at_once(device: torch.device) -> int:
    """Programs of a decode kernel that the device runs side by side."""
    if device.type != "cuda":
        return RESIDENT * 132  # in the interpreter: as an H200
    return RESIDENT * int(torch.cuda.get_device_properties(device).multi_processor_count)


def prefill_tiles(q: Tensor, kv_heads: int) -> Tiles:
    """Sizes for several queries a sequence."""
    group, wide = q.shape[1] // kv_heads, q.shape[2] > 128
    if q.dtype == torch.float32:
        return Tiles(max(16 if wide else 32, next_power_of_2(group)), 16 if wide else 32,
                     4, 1, False)  # fmt: skip
    if wide:
        return Tiles(max(128, next_power_of_2(group)), 64, 8, 2, False)
    # one warpgroup a program, two programs a multiprocessor: one multiplies while one takes exps
    return Tiles(max(64, next_power_of_2(group)), 64, 8 if group > 64 else 4, 3, True)


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
