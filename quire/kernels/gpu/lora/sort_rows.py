"""Rows of a step by slot, on the device: a program for each slot reads the slots of all rows twice.

It is launched once a step. Rows of one slot stay in their order.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel
from quire.kernels.gpu.runtime.int_math import next_power_of_2

CHUNK = 2048  # rows that a program reads at a time


@kernel("rows")
def _sort(
    slot_ptr,  # [T]
    order_ptr,  # [T] out
    start_ptr,  # [S + 1] out
    rows,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) - 1  # -1: rows without an adapter
    before = 0
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.maximum(tl.load(slot_ptr + at, at < rows, S), -1)
        before += tl.sum((found < slot).to(tl.int32), 0)
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.maximum(tl.load(slot_ptr + at, at < rows, S), -1) == slot
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + before + rank - 1, at, mine)
        before += tl.sum(mine.to(tl.int32), 0)
    tl.store(start_ptr + slot + 1, before)  # the end of these rows


def outputs(slots: Tensor, order: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return order, starts


def launch(outs: tuple[Tensor, Tensor], slots: Tensor, order: Tensor, starts: Tensor) -> None:
    rows, count = len(slots), len(starts) - 1
    block = min(max(next_power_of_2(rows), 128), CHUNK)
    _sort((count + 1, 1, 1), (slots, order, starts), (rows,), (count, block))
