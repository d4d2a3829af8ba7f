"""Split plans: divide attention's launches into programs, from numbers the host has.

The host does not have the contexts of a captured step: it fixes how many ranges a context may be
split into at most, and the kernel computes on the device how long they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.target import sm_count
from quire.kernels.kv_write import CODES

MAX_DECODE_SPLITS = 32
"""Maximum number of ranges of a context: the last program merges them one after the other."""

RESIDENT_PER_SM = 3
"""Programs of a decode kernel that a multiprocessor holds at once (by shared memory)."""

MAX_PREFILL_SPLITS = 32
"""Maximum of programs that share the prefix of one tile of a prompt."""

COUNTERS_PER_TILE = 2
"""For each tile and KV head: the number of warpgroups with a counter of their own."""

MIN_SPLIT_KEYS = 1024
"""Minimum of keys of a prompt's prefix for a program of their own."""


class AttentionExtras(NamedTuple):
    """Features of a layer and a step beyond plain causal attention."""

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
    position_bias: Tensor | None = None
    scales: Tensor | None = None
    spans: Tensor | None = None
    shared: SharedPrefixes | None = None
    balanced: bool = False

    @property
    def reach(self) -> int:
        """The distance at which the position bias is cut; 0: there is none."""
        return 0 if self.position_bias is None else self.position_bias.shape[1] // 2

    def device(self, cache: Tensor) -> AttentionExtras:
        """The same without scales of the layer, if the cache has no codes or these their own."""
        if cache.dtype in CODES and self.scales is None:
            return self
        return self._replace(k_scale=1.0, v_scale=1.0)


class SplitPlan(NamedTuple):
    """A decode launch: keys per iteration, keys of the shortest range, most ranges, options."""

    tile_keys: int
    min_chunk: int
    warps: int
    stages: int
    splits: int
    max_splits: int = 1  # `splits` of the longest possible context
    balanced: int = 0
    """A power of two, at least the number of sequences: no range is longer than a share of all
    their keys, one of `splits` less one for each sequence. 0: ranges depend on their own context
    alone."""

    def programs(self, rows: int) -> int:
        """Programs of a KV head: those that a range of some context may need."""
        return rows + self.splits if self.balanced else rows * self.splits

    @property
    def may_split(self) -> bool:
        """The kernel's identity: by the longest contexts, or each step would compile its own."""
        return self.balanced > 0 or max(self.splits, self.max_splits) > 1


class SharedPlan(NamedTuple):
    """A launch over shared leading keys: rows of a tile, keys per iteration and of the shortest
    range, most ranges, options."""

    rows: int
    tile_keys: int
    chunk: int
    warps: int
    stages: int
    splits: int


class PrefillTiles(NamedTuple):
    """A prefill launch: rows (queries times heads), keys per iteration, launch options.

    tma: the bulk copy engine fetches the keys and values.
    """

    rows: int
    tile_keys: int
    warps: int
    stages: int
    tma: bool


def plan_decode(
    q: Tensor, cache: Tensor, tables: Tensor, rows: int, extras: AttentionExtras
) -> SplitPlan:
    """Sizes for one query per sequence. In float32 they are the same for every number of rows."""
    kv_heads, block, size = cache.shape[2:]
    wide, programs = size > 128, rows * kv_heads
    if extras.balanced and _may_balance(q, kv_heads, extras):
        return _plan_balanced(rows, kv_heads, q.device, wide)
    if q.dtype == torch.float32:
        cut = SplitPlan(16 if wide else 32, 64, 4, 3, MAX_DECODE_SPLITS)
    elif q.shape[1] // kv_heads > 32:
        cut = SplitPlan(
            32, 128, 8, 3, max(1, min(resident_programs(q.device) // programs, MAX_DECODE_SPLITS))
        )
    elif programs <= sm_count(q.device):
        cut = _plan_few_programs(sm_count(q.device) // programs, wide)
    else:
        cut = _plan_many_programs(programs, resident_programs(q.device), 32 if wide else 64)
    bound = min(extras.max_context or 1 << 30, tables.shape[1] * block)
    splits = max(1, min(cut.splits, -(-bound // cut.min_chunk)))
    return cut._replace(splits=splits, max_splits=cut.splits)


BALANCED_LAUNCH = (64, 2, 5, RESIDENT_PER_SM)
"""Of balanced ranges: keys per iteration, warps, stages, programs of a multiprocessor."""

BALANCED_CHUNK = 256
"""Keys of the shortest balanced range."""

LEAST_BALANCED = 64
"""Sequences up to which launches with balanced ranges are one kernel."""


def _plan_balanced(rows: int, kv_heads: int, device: torch.device, wide: bool) -> SplitPlan:
    """As many ranges as run at once, none longer than their share of all keys; twice as many, and
    so on, where there are half as many rows: a range is never longer than a row."""
    tile, warps, stages, per_sm = BALANCED_LAUNCH
    room = max(per_sm * sm_count(device) // kv_heads, 1)
    room *= 1 + 2 * rows // room
    sequences = max(next_power_of_2(rows), LEAST_BALANCED)
    tile = tile // 2 if wide else tile
    return SplitPlan(tile, BALANCED_CHUNK, warps, stages, room, room, sequences)


def _may_balance(q: Tensor, kv_heads: int, extras: AttentionExtras) -> bool:
    """Whether ranges may depend on all contexts: a result in float32 must not, and a window or
    shared keys move where a range begins."""
    bound = extras.window is not None or extras.shared is not None
    return q.dtype != torch.float32 and not bound and q.shape[1] // kv_heads <= 32


MAX_SHARED_SPLITS = 8
"""Maximum number of ranges of shared keys: each sequence merges them."""


def plan_shared(q: Tensor, kv_heads: int, shared: SharedPrefixes) -> SharedPlan:
    """Sizes for tiles of sequences that share leading keys; some of the tiles are unused."""
    group, wide = q.shape[1] // kv_heads, q.shape[2] > 128
    rows = max(16, next_power_of_2(shared.tile_rows * group))
    if q.dtype == torch.float32:
        return SharedPlan(rows, 16, 64, 4, 2, MAX_SHARED_SPLITS)
    tiles = -(-len(shared.members) // shared.tile_rows)
    splits = sm_count(q.device) // (tiles * kv_heads)  # more take longer to merge than they save
    warps = 8 if rows > 64 else 4
    tile_keys = 32 if wide else 64
    return SharedPlan(rows, tile_keys, 256, warps, 3, max(1, min(splits, MAX_SHARED_SPLITS)))


def _plan_few_programs(per_sm: int, wide: bool) -> SplitPlan:
    """One program per multiprocessor: wide ones, which load a stretch at once.

    Most time is spent on fetching instructions, each used once: eight warps have the fewest, and no
    pipeline around a loop with few iterations.
    """
    tile = 64 if wide else 128
    return SplitPlan(tile, tile, 8, 1 if per_sm >= 8 else 3, min(per_sm, 16))


def _plan_many_programs(programs: int, at_once: int, tile: int) -> SplitPlan:
    """Two warps per program: fewer wait for one another, and each copies 64 KiB ahead.

    Split so that all run at once, none twice; a large batch only so that the longest context does
    not take much longer than the rest.
    """
    if programs <= at_once:
        return SplitPlan(tile, 64, 2, 5, at_once // programs)
    if programs <= 1024:
        return SplitPlan(tile, 1024, 2, 5, 4)
    return SplitPlan(tile, 4096, 2, 5, 2)


def resident_programs(device: torch.device) -> int:
    """Programs of two warps that the device runs at once."""
    return RESIDENT_PER_SM * sm_count(device)


def plan_prefill_tiles(q: Tensor, kv_heads: int) -> PrefillTiles:
    """Sizes for several queries per sequence."""
    group, wide = q.shape[1] // kv_heads, q.shape[2] > 128
    if q.dtype == torch.float32:
        return PrefillTiles(max(16 if wide else 32, next_power_of_2(group)), 16 if wide else 32,
                     4, 1, False)  # fmt: skip
    if q.shape[2] > 256:  # queries, keys and values take 192 KiB of shared memory
        return PrefillTiles(64, 32, 8, 2, False)
    if wide:
        return PrefillTiles(max(128, next_power_of_2(group)), 64, 8, 2, False)
    # one warpgroup per program, two programs per multiprocessor: products of one overlap exps of
    # the other
    return PrefillTiles(max(64, next_power_of_2(group)), 64, 8 if group > 64 else 4, 3, True)


class PrefillSplits(NamedTuple):
    """How many programs share the prefix of a tile of a prompt, and where they store parts.

    may_split: the kernel's identity, whatever the contexts of this step.
    """

    splits: int = 1
    may_split: bool = False
    partial_out: Tensor | None = None  # [tiles, K, splits, rows, D] fp32
    partial_stats: Tensor | None = None  # [tiles, K, splits, 2, rows] fp32
    counters: Tensor | None = None  # at least one zero for each tile and KV head


def plan_prefill_splits(
    q: Tensor, kv_heads: int, tokens: int, tiles: int, rows: int, at_once: int, extras:
    AttentionExtras,
    longest: int,
) -> PrefillSplits:  # fmt: skip
    """For `tokens` new tokens in at most `tiles` tiles of so many rows for each KV head.

    at_once: programs that the device runs at once. longest: maximum context. In float32 nothing is
    split: a result must not depend on the rest of the step.
    """
    full = max(tokens * q.shape[1] // (kv_heads * rows), 1) * kv_heads  # programs that have work
    most = min(at_once // full, MAX_PREFILL_SPLITS)
    if q.dtype == torch.float32 or min(most, longest // MIN_SPLIT_KEYS) < 2:
        return PrefillSplits()
    splits = max(1, min(most, min(longest, extras.max_context or longest) // MIN_SPLIT_KEYS))
    cells, counters = tiles * kv_heads * splits * rows, extras.counters
    part = torch.empty(cells * q.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
    if counters is None or counters.numel() < tiles * kv_heads * COUNTERS_PER_TILE:
        counters = torch.zeros(
            tiles * kv_heads * COUNTERS_PER_TILE, dtype=torch.int32, device=q.device
        )
    return PrefillSplits(splits, True, part, stats, counters)


def allocate_split_workspace(
    q: Tensor, kv_heads: int, rows: int, cut: SplitPlan, counters: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(parts, their maxima and sums, counters) of a split launch."""
    if not cut.may_split:
        return None, None, None
    cells = cut.programs(rows) * q.shape[1]
    part = torch.empty(cells * q.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.empty(cells * 2, dtype=torch.float32, device=q.device)
    if counters is None or counters.numel() < rows * kv_heads:
        counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
    return part, stats, counters
