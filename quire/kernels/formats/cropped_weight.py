"""Part of a stored weight, where ranks cut it inside of blocks that share a scale or a word.

The rank stores whole blocks. Inputs that are not its own are multiplied as zeros, and outputs that
are not its own are dropped, so no kernel needs to handle a part of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.weight import StoredWeight
from quire.kernels.framework import lazy_fusion
from quire.kernels.native.op_tape import on_replay


@dataclass(frozen=True, slots=True, eq=False)
class CroppedWeight(StoredWeight):
    """The weight [O, I] that is rows and columns of a larger one.

    kept: rows of each part of the inner weight, in order; outputs: all of those. columns: those of
    the inner weight; width: all of those.
    """

    kind: ClassVar[str] = "cropped"
    inner: StoredWeight
    kept: tuple[range, ...]
    outputs: int
    columns: range
    width: int

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As StoredWeight.product."""
        lazy_fusion.flush()  # x, and below y, are read by torch
        if len(self.columns) < self.width:
            x = on_replay(self._widen, x, shape=(x.shape[0], self.width))
        if sum(map(len, self.kept)) == self.outputs:
            return self.inner.product(x, bias)
        y = self.inner.product(x)
        lazy_fusion.flush()
        shape = (x.shape[0], sum(map(len, self.kept)))
        return on_replay(self._crop, y, *(() if bias is None else (bias,)), shape=shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I]."""
        plain = self.inner.dequantize(dtype)[:, self.columns.start : self.columns.stop]
        return torch.cat([plain[one.start : one.stop] for one in self.kept])

    def _widen(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.columns.start, self.width - self.columns.stop))

    def _crop(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        kept = torch.cat([y[:, one.start : one.stop] for one in self.kept], 1)
        return kept if bias is None else kept + bias
