"""A weight in signed bytes (W8A8) as native products of a CPU read it: panels of 8-bit codes.

Axes: O outputs, I inputs, P panels of 32 outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.formats.int8_weight import Int8Weight
from quire.kernels.formats.panel_codes import PANEL, pack_code_panels, unpack_code_panels
from quire.kernels.formats.weight import StoredWeight


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PanelInt8(StoredWeight):
    """An Int8Weight [O, I].

    codes: uint8, the bytes as pack_code_panels lays them out. scale: float32 [P * 32]. sums: int32
    [P * 32], or None. The others: as there.
    """

    kind: ClassVar[str] = "panel_int8"
    codes: Tensor
    scale: Tensor
    sums: Tensor | None
    shape: tuple[int, int]
    input_scale: Tensor | None
    input_zero_point: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        sums = 0 if self.sums is None else self.sums.nbytes
        return self.codes.nbytes + self.scale.nbytes + sums

    def int8_weight(self) -> Int8Weight:
        """The weight in rows."""
        outputs, inputs = self.shape
        return Int8Weight(
            data=unpack_code_panels(self.codes, 8)[:outputs, :inputs].contiguous().view(torch.int8),
            scale=self.scale[:outputs],
            sums=None if self.sums is None else self.sums[:outputs],
            input_scale=self.input_scale,
            input_zero_point=self.input_zero_point,
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        return self.int8_weight().dequantize(dtype)


def pack_panel_int8(weight: Int8Weight) -> PanelInt8:
    """Pack a weight in rows."""
    more = (0, -weight.shape[0] % PANEL)
    return PanelInt8(
        codes=pack_code_panels(weight.data.view(torch.uint8), 8),
        scale=pad(weight.scale, more),
        sums=None if weight.sums is None else pad(weight.sums, more),
        shape=weight.shape,
        input_scale=weight.input_scale,
        input_zero_point=weight.input_zero_point,
    )
