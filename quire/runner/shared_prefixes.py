"""Shared prefixes: find rows whose block tables begin alike, whose keys attention reads once.

Blocks are shared by the prefix cache and by forks. A block with one number in two tables has the
same tokens before it in both, and no step writes to it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import SharedAttentionStep
from quire.core.types import StepPlan
from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.models.base import StepInputs
from quire.runner.parts.base import NoOwnGraphs
from quire.runner.step_batch import StepBatch
from quire.sampling.h2d import to_device

LEAST_GROUP: Final = 4
"""Rows of a group: fewer read their keys alone."""
LEAST_ROWS: Final = 16
"""Rows of a step with groups: graphs with groups begin there."""
LEAST_SAVED: Final = 1024
"""Blocks that a step must read less often: the groups take a kernel more in each layer."""
TILE_ROWS: Final = 128
"""Query heads of a KV head, times sequences, of a tile."""


class PrefixGroup(NamedTuple):
    """Rows whose tables begin with the same blocks."""

    rows: list[int]
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks that are read less often."""
        return (len(self.rows) - 1) * self.blocks


def find_groups(tables: Seq[list[int]]) -> list[PrefixGroup]:
    """Return groups of at least LEAST_GROUP rows; no row is in two. Its last block is no part."""
    by_first: dict[int, list[int]] = {}
    for row, table in enumerate(tables):
        if len(table) > 1:
            by_first.setdefault(table[0], []).append(row)
    groups = []
    left = [rows for rows in by_first.values() if len(rows) >= LEAST_GROUP]
    while left:
        rows = left.pop()
        group = _best_group(rows, _common_blocks(tables, rows, rows[0]))
        if 2 * len(group.rows) < len(rows) or 2 * group.blocks < len(tables[rows[-1]]):
            other = _best_group(rows, _common_blocks(tables, rows, rows[-1]))
            group = max(group, other, key=lambda one: one.saved)
        groups.append(group)
        inside = set(group.rows)
        rest = [row for row in rows if row not in inside]
        if len(rest) >= LEAST_GROUP:
            left.append(rest)
    return groups


def _common_blocks(tables: Seq[list[int]], rows: list[int], first: int) -> Iterator[int]:
    """Yield how many leading blocks each row has in common with one of them."""
    whole = tables[first]
    guess = 1
    for row in rows:
        table = tables[row]
        low, high = 1, min(len(whole), len(table)) - 1
        if low < guess < high and table[guess - 1] == whole[guess - 1]:
            low = guess
            if table[guess] != whole[guess]:
                high = guess
        while low < high:
            middle = (low + high + 1) // 2
            if table[middle - 1] == whole[middle - 1]:
                low = middle
            else:
                high = middle - 1
        guess = low
        yield low


def _best_group(rows: list[int], common: Iterator[int]) -> PrefixGroup:
    """Return the rows that save most with so many blocks in common with one of them."""
    blocks = list(common)
    ordered = sorted(blocks, reverse=True)
    saved = [
        (count * ordered[count], ordered[count]) for count in range(LEAST_GROUP - 1, len(rows))
    ]
    _, depth = max(saved)
    return PrefixGroup([row for row, own in zip(rows, blocks) if own >= depth], depth)


def find_worthy_groups(plan: StepPlan, batch: StepBatch) -> list[PrefixGroup]:
    """Return the groups of a step's rows; [] if they would save too little, or another feature has
    a part in the step."""
    if not batch.decode_only or batch.uses_drafts or plan.parts or len(batch.rows) < LEAST_ROWS:
        return []
    groups = find_groups([row.seq.tables[0] for row in plan.rows])
    return groups if sum(group.saved for group in groups) >= LEAST_SAVED else []


class SharedPrefixRows(NoOwnGraphs):
    """The variant of decode steps with groups. What its kernels read has fixed addresses."""

    name = "shared prefixes"
    changes_logits = False
    decodes = True
    has_prompts = False
    least_rows = LEAST_ROWS
    most_rows = None
    few_graphs = True
    rotary_axes = 1

    def __init__(
        self, max_rows: int, block_size: int, tile_rows: int, device: torch.device
    ) -> None:
        """max_rows: of a step. tile_rows: sequences of a tile."""
        self._block_size, self._tile_rows = block_size, tile_rows
        self._max_rows = max_rows
        self._written = np.zeros(2 * max_rows + 3 * _tiles(max_rows), dtype=np.int32)
        self._on_device = torch.zeros(len(self._written), dtype=torch.int32, device=device)

    def write(self, groups: Seq[PrefixGroup]) -> None:
        """Write the groups of the next step, on the current stream."""
        words = np.zeros_like(self._written)
        lengths, members, tiles = self._split(words)
        place = tile = 0
        for rows, blocks in groups:
            lengths[rows] = blocks * self._block_size
            members[place : place + len(rows)] = rows
            for at in range(0, len(rows), self._tile_rows):
                count = min(self._tile_rows, len(rows) - at)
                tiles[3 * tile : 3 * tile + 3] = place + at, count, blocks * self._block_size
                tile += 1
            place += len(rows)
        if not np.array_equal(words, self._written):
            self._on_device.copy_(to_device(words, self._on_device.device))
            self._written = words

    def _split(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            words[: self._max_rows],
            words[self._max_rows : 2 * self._max_rows],
            words[2 * self._max_rows :],
        )

    def reset(self) -> None:
        pass

    def inputs(self, step: StepInputs) -> StepInputs:
        """Give attention the groups."""
        rows, most = len(step.token_ids), self._max_rows
        tiles: Tensor = self._on_device[2 * most :].view(-1, 3)
        shared = SharedPrefixes(
            self._on_device[:rows],
            self._on_device[most : most + rows],
            tiles[: _tiles(rows)],
            self._tile_rows,
        )
        attention = cast(SharedAttentionStep, step.attention)
        return replace(step, attention=attention.with_shared(shared))

    def forward(self, token_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def logits(self, row_slots: Tensor) -> AbstractContextManager[object]:
        return nullcontext()


def _tiles(rows: int) -> int:
    """Most tiles of a step with so many rows: a group has LEAST_GROUP rows or more."""
    return max(rows // LEAST_GROUP, 1)


def attach_shared_prefixes(
    model: object, max_rows: int, block_size: int, heads_per_kv_head: int, device: torch.device
) -> None:
    """Give a model the variant, for the parts of steps."""
    tile_rows = max(TILE_ROWS // heads_per_kv_head, 1)
    model.shared_prefixes = SharedPrefixRows(  # type: ignore[attr-defined]
        max_rows, block_size, tile_rows, device
    )


def find_shared_prefixes(model: object) -> SharedPrefixRows | None:
    """Return the variant of a model; None: it has none."""
    found = getattr(model, "shared_prefixes", None)
    assert found is None or isinstance(found, SharedPrefixRows)
    return found
