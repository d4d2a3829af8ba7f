"""Rows of a step by slot, on the device: a program for each slot reads the slots of all rows twice.

It is launched once a step, and finds the slots by sequence: so the host writes only what changes.
Rows of one slot stay in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

CHUNK = 2048  # rows that a program reads at a time


@triton.jit
def _load_slots(slot_ptr, table_ptr, sequence_ptr, at, rows, S: tl.constexpr):
    """Slots of rows, -1: none; S: no such row."""
    live = at < rows
    if table_ptr is None:
        slot = tl.load(slot_ptr + at, live, -1)
    else:
        sequence = tl.load(sequence_ptr + at, live, 0)
        slot = tl.load(table_ptr + sequence, live & (sequence >= 0), -1)
    return tl.where(live, tl.maximum(slot, -1), S)


@kernel("rows")
def _sort(
    slot_ptr,  # [T]; out with a table
    order_ptr,  # [T] out
    start_ptr,  # [S + 1] out
    table_ptr,  # [M] or None
    sequence_ptr,  # [T] or None
    rows,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) - 1  # -1: rows without an adapter
    before = 0
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = _load_slots(slot_ptr, table_ptr, sequence_ptr, at, rows, S)
        before += tl.sum((found < slot).to(tl.int32), 0)
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = _load_slots(slot_ptr, table_ptr, sequence_ptr, at, rows, S) == slot
        if table_ptr is not None:
            tl.store(slot_ptr + at, slot, mine)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + before + rank - 1, at, mine)
        before += tl.sum(mine.to(tl.int32), 0)
    tl.store(start_ptr + slot + 1, before)  # the end of these rows


def outputs(
    slots: Tensor,
    order: Tensor,
    starts: Tensor,
    table: Tensor | None = None,
    sequences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return slots, order, starts


def launch(
    outs: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    order: Tensor,
    starts: Tensor,
    table: Tensor | None = None,
    sequences: Tensor | None = None,
) -> None:
    rows, count = len(slots), len(starts) - 1
    block = min(max(next_power_of_2(rows), 128), CHUNK)
    _sort((count + 1, 1, 1), (slots, order, starts, table, sequences), (rows,), (count, block))
