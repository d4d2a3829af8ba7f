"""A weight matrix stored the way the native matrix product reads it.

    [ceil(O / 32), steps, 32, per]      a step is 4 bytes of a row: 2 bfloat16 or 1 float32
    element (o, i) is at [o // 32, i // per, o % 32, i % per], the rest is zero

One panel of 32 outputs is one stream: a single row (decoding) reads it at the speed of memory,
many rows (a prompt) keep it in the cache. As large as the plain matrix, padding aside; the
embedding gathers its rows from it, so that tied weights are stored once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.formats.weight import StoredWeight

PANEL_COLUMNS = 32


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight(StoredWeight):
    """A weight [O, I] in panels. `data` is flat: panels * steps * 32 * per elements."""

    kind: ClassVar[str] = "packed"

    data: Tensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], as a new tensor."""
        outputs, inputs = self.shape
        panels = self.data.view(*panel_shape(outputs, inputs, self.dtype))
        return (
            panels.transpose(1, 2)
            .flatten(2)
            .flatten(0, 1)[:outputs, :inputs]
            .to(dtype or self.dtype)
            .contiguous()
        )


def panel_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(panels, steps, 32, per) of a packed [O, I] matrix."""
    per = 4 // dtype.itemsize
    return -(-outputs // PANEL_COLUMNS), -(-inputs // per), PANEL_COLUMNS, per


def pack_panels(weight: Tensor) -> PackedWeight:
    """Pack a [O, I] matrix in plain PyTorch: the native packing must equal this."""
    outputs, inputs = weight.shape
    panels, steps, columns, per = panel_shape(outputs, inputs, weight.dtype)
    padded = weight.new_zeros(panels * columns, steps * per)
    padded[:outputs, :inputs] = weight
    data = padded.view(panels, columns, steps, per).transpose(1, 2).contiguous()
    return PackedWeight(data.view(-1), (outputs, inputs))
