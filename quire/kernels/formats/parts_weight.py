"""Weights whose outputs are stored in several forms: their products are concatenated.

A fused layer (q, k, v; gate, up) has such a weight if its parts are in different formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.concat_columns import concat_columns
from quire.kernels.formats.weight import ExpertBank, PlainExperts, PlainWeight, StoredWeight


@dataclass(frozen=True, slots=True, eq=False)
class PartsWeight(StoredWeight):
    """A weight [O, I] of parts [O_i, I], which follow one another along O.

    sizes: O_i of each.
    """

    kind: ClassVar[str] = "parts"
    parts: tuple[StoredWeight, ...]
    sizes: tuple[int, ...]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As StoredWeight.product: each part has its share of the bias."""
        ends = list(accumulate(self.sizes))
        made = [
            part.product(x, None if bias is None else bias[end - size : end])
            for part, size, end in zip(self.parts, self.sizes, ends, strict=True)
        ]
        return concat_columns(made)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default."""
        dtype = dtype or torch.float32
        return torch.cat([part.dequantize(dtype) for part in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class PartsExperts(ExpertBank):
    """The same of X experts: banks [X, O_i, I] with the same experts."""

    kind: ClassVar[str] = "parts"
    banks: tuple[ExpertBank | PlainExperts, ...]
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.banks[0])

    def __getitem__(self, expert: int) -> PartsWeight:
        ones = (bank[expert] for bank in self.banks)
        return PartsWeight(tuple(map(_as_weight, ones)), self.sizes)


def _as_weight(one: StoredWeight | Tensor) -> StoredWeight:
    """A plain bank gives tensors."""
    if isinstance(one, StoredWeight):
        return one
    return PlainWeight(one, requires_grad=False)
