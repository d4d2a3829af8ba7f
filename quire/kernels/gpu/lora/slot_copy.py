"""Slot copy: the tensors of an adapter go from one buffer to the banks of all layers in one launch.

The buffer is pinned host memory, which has an address that the GPU can use, or on the device. Few
programs run, one block of a copy after the other: the bus is the limit, and the kernels of steps
run beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.runtime.fast_launch import kernel

PROGRAMS = 32
BLOCK = 4096  # units
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes that are copied at a time -> dtype."""


class CopyTable(NamedTuple):
    """What to copy, to any slot. copies: int64 [n, 8]. blocks: int32 [m, 2], copy and block of it.

    A copy: where it begins in the buffer, and its numbers of units, columns of a row, and rows of a
    group; the address of slot 0, and units from slot to slot, group to group, row to row.
    """

    copies: Tensor
    blocks: Tensor
    unit: torch.dtype


def build_copy_table(places: Sequence[tuple[int, Tensor]], device: torch.device) -> CopyTable:
    """places: byte in the buffer, and where it goes: [S, ..], of which two axes may have gaps."""
    made, bytes_of = [], []
    for at, place in places:
        sizes, strides = _merge_axes(place[0])
        size = place.element_size()
        numbers = [at, place[0].numel(), sizes[-1], place.data_ptr(), place.stride(0), *strides[:2]]
        scaled = [n if i in (0, 3) else n * size for i, n in enumerate(numbers)]
        made.append((scaled, sizes[1]))
        bytes_of += scaled
    unit = math.gcd(4, *bytes_of)
    copies, counts = [], []
    for (at, total, columns, address, *gaps), rows in made:
        slot, group, row = (gap // unit for gap in gaps)
        copies.append((at // unit, total // unit, columns // unit, rows, address, slot, group, row))
        counts.append(-(-total // unit // BLOCK))
    return CopyTable(
        torch.tensor(copies, dtype=torch.int64).view(-1, 8).to(device),
        _blocks_of(torch.tensor(counts, dtype=torch.int64)).to(device),
        UNITS[unit],
    )


def _blocks_of(counts: Tensor) -> Tensor:
    """Number all blocks of all copies. counts: [n] int64. Returns int32 [m, 2]."""
    copy = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = counts.cumsum(0) - counts
    return torch.stack((copy, torch.arange(len(copy)) - first[copy]), 1).int()


def _merge_axes(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of three axes over the same elements; the last has no gaps."""
    sizes, strides = [1], [1]  # the last axis first
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    assert len(sizes) <= 3, f"{tuple(tensor.shape)} with strides {tensor.stride()}"
    gaps = 3 - len(sizes)
    return [1] * gaps + sizes[::-1], [0] * gaps + strides[::-1]


@kernel("slot", "blocks")
def _slot_copy(
    copy_ptr,  # [n, 8]
    block_ptr,  # [blocks, 2]
    buffer_ptr,
    slot,
    blocks,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for i in range(tl.program_id(0), blocks, PROGRAMS):
        at = copy_ptr + tl.load(block_ptr + 2 * i).to(tl.int64) * 8
        n = tl.load(block_ptr + 2 * i + 1) * BLOCK + tl.arange(0, BLOCK)
        source = buffer_ptr + tl.multiple_of(tl.load(at), 16)
        live = n < tl.load(at + 1)
        columns = tl.load(at + 2).to(tl.int32)
        rows = tl.load(at + 3).to(tl.int32)
        target = tl.load(at + 4).to(tl.pointer_type(buffer_ptr.dtype.element_ty))
        target += slot.to(tl.int64) * tl.load(at + 5)
        row = n // columns
        target += (row // rows) * tl.load(at + 6) + (row % rows) * tl.load(at + 7)
        tl.store(target + n % columns, tl.load(source + n, live, 0), live)


def copy_to_slot(buffer: Tensor, table: CopyTable, slot: int) -> None:
    """buffer: uint8, on the device or pinned; it must stay as it is until the copies are done."""
    blocks = len(table.blocks)
    if blocks:
        _slot_copy(
            (min(PROGRAMS, blocks), 1, 1),
            (table.copies, table.blocks, buffer.view(table.unit)),
            (slot, blocks),
            (PROGRAMS, BLOCK),
            warps=8,
        )
