"""Table changes: writes entries of block tables that are on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.kernels.gpu.runtime import step_io
from quire.runner.gpu.staging_buffer import StagingBuffer, align_words
from quire.runner.slots import BlockTableUpdate


def write_table_changes(
    changes: Sequence[BlockTableUpdate], tables: Tensor, staging: StagingBuffer
) -> None:
    """Write the entries that a step adds, with one copy to the device.

    tables: int32 [tables, M, W] of M slots. staging: of words, two for each entry.
    """
    at: list[int] = []
    blocks: list[int] = []
    slots, width = tables.shape[1:]
    for group, slot, start, added in changes:
        first = (group * slots + slot) * width + start
        at.extend(range(first, first + len(added)))
        blocks.extend(added)
    count = len(at)
    stride = align_words(count)
    words = staging.acquire(2 * stride)
    words[:count] = at
    words[stride : stride + count] = blocks
    staging.send(stride + count)
    sent = staging.on_device
    step_io.write_tables(sent[:count], sent[stride : stride + count], tables)
