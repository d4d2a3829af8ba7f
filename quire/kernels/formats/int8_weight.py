"""A weight matrix in signed bytes, which multiplies rows of x in bytes too (W8A8).

    w[o, i] = data[o, i] * scale[o]
    x[t, i] = (q[t, i] - zero[t]) * s[t]                 quantize_int8: by row, or fixed

    sum_i x w = s[t] * scale[o] * (sum_i q[t, i] * data[o, i] - zero[t] * sums[o])

so the sum over the inputs is one of integers, and exact. The product is in int8_linear.py.

Axes: X experts, O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.formats.weight import ExpertBank, StoredWeight

INT8_MAX = 127
"""The largest code. A symmetric row uses -127 to 127, an asymmetric one -128 to 127."""

MIN_RANGE = 1e-10
"""Lower bound of a row's magnitude or range, so that all zeros have a scale too."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Int8Weight(StoredWeight):
    """A weight [O, I].

    data: int8 [O, I], contiguous. scale: float32 [O], contiguous.
    sums: int32 [O], of data over its inputs; None: rows of x have no zero point.
    input_scale: float32 [1], the scale that a checkpoint fixed for x; None: each row has its own.
    input_zero_point: int32 [1], fixed beside input_scale where x is asymmetric.
    """

    kind: ClassVar[str] = "int8"
    data: Tensor
    scale: Tensor
    sums: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.int8, self.data.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert self.scale.shape == self.data.shape[:-1], (self.scale.shape, self.data.shape)
        fixed_zero = self.input_scale is not None and self.sums is not None
        assert (self.input_zero_point is not None) == fixed_zero

    @property
    def symmetric(self) -> bool:
        """Whether rows of x have no zero point."""
        return self.sums is None

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes + (0 if self.sums is None else self.sums.nbytes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        return (self.data.float() * self.scale[:, None]).to(dtype or torch.float32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Int8ExpertWeights(ExpertBank):
    """The same of X experts: data [X, O, I], scale and sums [X, O]; x is quantized alike for all.

    input_scale, input_zero_point: [1].
    """

    kind: ClassVar[str] = "int8"
    data: Tensor
    scale: Tensor
    sums: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    def __len__(self) -> int:
        return self.data.shape[0]

    def __getitem__(self, expert: int) -> Int8Weight:
        return Int8Weight(
            data=self.data[expert],
            scale=self.scale[expert],
            sums=None if self.sums is None else self.sums[expert],
            input_scale=self.input_scale,
            input_zero_point=self.input_zero_point,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, inputs = self.data.shape
        return experts, outputs, inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes + (0 if self.sums is None else self.sums.nbytes)


def quantize_outputs(weight: Tensor, *, symmetric_inputs: bool = True) -> Int8Weight:
    """Quantize a weight [O, I] with one scale per output. symmetric_inputs: how x will be."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp(min=MIN_RANGE) / INT8_MAX
    data = (wide / scale[:, None]).round().to(torch.int8)
    return Int8Weight(data=data, scale=scale, sums=None if symmetric_inputs else sum_inputs(data))


def sum_inputs(data: Tensor) -> Tensor:
    """int8 [..., O, I] -> int32 [..., O]."""
    return data.sum(-1, dtype=torch.int32)
