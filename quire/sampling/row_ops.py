"""Row operations: whole-row arithmetic over logits on the CPU, block by block.

Each row's result depends on that row alone. Large batches go through one scratch that stays in the
CPU's cache. The arithmetic itself is quire.sampling.numpy_ops's.

Axes: B rows of a block, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.sampling import numpy_ops
from quire.sampling.numpy_ops import CHUNK

CACHE_ELEMENTS = 1 << 17
"""Elements of a block on the CPU: half a MiB of float32, which fits the second-level cache."""


class ScratchBuffers:
    """Two reusable float32 buffers of a block's size, valid until the next take."""

    def __init__(self, vocab: int, most_rows: int) -> None:
        self.vocab = vocab
        self.width = -(-vocab // CHUNK) * CHUNK
        self.block = max(1, min(most_rows, CACHE_ELEMENTS // vocab))
        self._buffers = torch.zeros((2, self.block, self.width), dtype=torch.float32)

    def buffer(self, which: int, rows: int) -> Tensor:
        """A buffer [rows, width] whose columns from vocab on are 0, and must stay 0."""
        return self._buffers[which, :rows]

    def blocks(self, rows: int) -> Iterator[slice]:
        """Split rows into blocks."""
        for start in range(0, rows, self.block):
            yield slice(start, min(start + self.block, rows))


def select_rows(logits: Tensor, rows: Tensor | None, block: slice) -> Tensor:
    """Rows `rows[block]` of logits; rows None: all of them, in order."""
    return logits[block] if rows is None else logits.index_select(0, rows[block])


def concat_blocks(parts: list[Tensor]) -> Tensor:
    """The blocks' results as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def logsumexp_rows(logits: Tensor, scratch: ScratchBuffers) -> Tensor:
    """log(sum(exp(row))) of each row, float64. logits: [n, V]."""
    parts = []
    for block in scratch.blocks(len(logits)):
        x = logits[block]
        buffer = scratch.buffer(0, len(x))
        top = x.amax(-1, keepdim=True).float()
        numpy_ops.exp_(torch.sub(x, top, out=buffer[:, : scratch.vocab]))
        parts.append(numpy_ops.chunk_sums(buffer)[:, -1].log() + top[:, 0])
    return concat_blocks(parts)


def argmax_rows(logits: Tensor, scratch: ScratchBuffers) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value (the lowest of equals) and that value, float32.

    A row with a NaN gives a NaN. logits: [n, V], any float dtype.
    """
    if logits.dtype == torch.float32:
        return numpy_ops.argmax(logits)
    found = []
    for block in scratch.blocks(len(logits)):
        part = scratch.buffer(0, block.stop - block.start)[:, : scratch.vocab]
        found.append(numpy_ops.argmax(part.copy_(logits[block])))
    return concat_blocks([ids for ids, _ in found]), concat_blocks([tops for _, tops in found])
