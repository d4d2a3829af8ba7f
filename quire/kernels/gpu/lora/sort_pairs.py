"""Sorts pairs of a token and an expert by slot and expert: a program for each reads the slot twice.

The tokens are sorted by slot already (sort_rows.py), so programs of slots without tokens end at
once. One program has the pairs without an adapter.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2
from quire.kernels.gpu.runtime.pdl import PDL_ENABLED, launch_dependents, wait_for_previous_kernel

CHUNK = 2048  # pairs that a program reads at a time


@kernel()
def _sort(
    row_order_ptr,  # [T]
    row_start_ptr,  # [S + 1]
    id_ptr,  # [T, TOP]
    slot_ptr,  # [T * TOP] out
    order_ptr,  # [T * TOP] out
    start_ptr,  # [S * X + 1] out
    X: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous_kernel()
        launch_dependents()
    key = tl.program_id(0) - 1  # -1: pairs without an adapter
    first, last = 0, tl.load(row_start_ptr) * TOP
    if key >= 0:
        first = tl.load(row_start_ptr + key // X) * TOP
        last = tl.load(row_start_ptr + key // X + 1) * TOP
    expert = key % X
    before = first
    if key >= 0:
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            live = at < last
            token = tl.load(row_order_ptr + at // TOP, live, 0)
            found = tl.load(id_ptr + token * TOP + at % TOP, live, X)
            before += tl.sum((found < expert).to(tl.int32), 0)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < last
        pair = tl.load(row_order_ptr + at // TOP, live, 0) * TOP + at % TOP
        found = tl.load(id_ptr + pair, live, X)
        mine = live & ((found == expert) | (key < 0))
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + before + rank - 1, pair, mine)
        tl.store(slot_ptr + pair, key, mine)
        before += tl.sum(mine.to(tl.int32), 0)
    tl.store(start_ptr + key + 1, before)  # the end of these pairs


def outputs(
    pair_slots: Tensor, order: Tensor, starts: Tensor, row_order: Tensor, row_starts: Tensor,
    ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (pair_slots, order, starts) if ids.is_contiguous() else NotImplemented


def launch(
    outs: tuple[Tensor, Tensor, Tensor], pair_slots: Tensor, order: Tensor, starts: Tensor,
    row_order: Tensor, row_starts: Tensor, ids: Tensor,
) -> None:  # fmt: skip
    pairs, keys = len(order), len(starts) - 1
    block = min(max(next_power_of_2(pairs), 128), CHUNK)
    _sort(
        (keys + 1, 1, 1),
        (row_order, row_starts, ids, pair_slots, order, starts),
        (),
        (keys // (len(row_starts) - 1), ids.shape[1], block, PDL_ENABLED),
        pdl=PDL_ENABLED,
    )
