"""Bits per weight in memory: matrices, the tensors that a checkpoint has of them, and layouts.

device    "cpu", "cuda", or BEFORE_FP8: a GPU that has no FP8 products
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

BEFORE_FP8 = "cuda before 8.9"
"""GPUs below compute capability 8.9: rows beside FP8 weights stay in 16 bits."""

TILE_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""Bits of a code -> bits of its low and of its high plane, in tiles of a GPU."""

TILE_GROUPS = (128, 64, 32, 16)
"""Inputs that may share a scale in tiles of a GPU; larger groups repeat theirs."""

LEAST_GROUP = 16
"""Inputs of the smallest group that kernels are made for; a matrix with smaller ones is widened."""


class Header(Protocol):
    """The header of a tensor, as quire.weights reads it."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are floats of 16 or more bits, or positions: no quantized weight."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MatrixFacts:
    """A linear layer, or a bank of experts. The sizes are over all ranks.

    tensors: of a matrix that is quantized in the checkpoint, by the last parts of their names. Its
    sizes are 0 until `WeightFormat.sized` has read them.
    """

    name: str
    outputs: int
    inputs: int
    tensors: Mapping[str, Header] = field(default_factory=dict, hash=False)

    def tensor(self, name: str) -> Header:
        """Return the tensor of this name, or the bank's that ends with it; else the largest."""
        for own, header in self.tensors.items():
            if own == name or own.endswith(f"_{name}"):
                return header
        return max(self.tensors.values(), key=lambda one: one.nbytes)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor of the matrix."""
        return name in self.tensors

    def float_bits(self, name: str, usual: int = 16) -> int:
        """Bits of a scale in memory: 32 if the checkpoint has float32. usual: without tensors."""
        if not self.has(name):
            return usual
        header = self.tensors[name]
        return 32 if header.nbytes >= 4 * math.prod(header.shape) else 16


def group_bits(bits: int, group: int, numbers: int, inputs: int, device: str) -> float:
    """Return bits per weight of codes, with so many bits of numbers for each group of a row.

    Tiles of a GPU are padded to whole blocks of inputs.
    """
    if device == "cpu":
        return bits + numbers / group
    size = next((one for one in TILE_GROUPS if group % one == 0), 0)
    if group < inputs and not size:
        return bits + numbers / group  # no tiles
    low, high = TILE_PLANES[bits]
    block = (16 if size == 16 and group < inputs else 32) * 16 // min(low, high or low)
    padding = -(-inputs // block) * block / inputs
    if group >= inputs:
        return bits * padding + numbers / inputs
    return (bits + numbers / size) * padding
