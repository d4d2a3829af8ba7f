"""State layout: what recurrent layers keep of a sequence, whatever its length. Arithmetic only.

    conv        the last inputs of a convolution    [channels, steps]   in the model's dtype
    recurrent   what a scan carries on              any shape           float32

A state is that of all layers. The tensors have a row for each slot of a running sequence, for each
checkpoint, and one for rows that pad a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What one layer keeps of a sequence."""

    conv: tuple[int, int]  # channels, steps
    recurrent: tuple[int, ...] = ()  # (): the layer has a convolution alone
    weights: int = 0  # elements of the layer's matrices, about

    def bytes(self, itemsize: int) -> int:
        """Bytes of a row. itemsize: of the model's dtype."""
        scanned = math.prod(self.recurrent) if self.recurrent else 0
        return math.prod(self.conv) * itemsize + scanned * 4


def state_bytes(layers: Sequence[StateFacts], itemsize: int) -> int:
    """Bytes of the state of one sequence."""
    return sum(one.bytes(itemsize) for one in layers)


def state_rows(max_seqs: int, checkpoints: int) -> int:
    """Rows of the tensors."""
    return max_seqs + checkpoints + 1
