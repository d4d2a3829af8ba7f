"""A weight matrix in eight bits: e4m3 numbers and their float32 scales.

    w[o, i] = data[o, i] * scale[o]                   one scale per output channel, or
              data[o, i] * scale[o // 128, i // 128]  one per square block

Rows of x are quantized too, each in the same way along the inputs: one scale per
row of x for channels, one per row and 128 inputs for blocks (`quantize_fp8`). So each product of
two scales is constant along what is summed between roundings, and the sum itself is over e4m3.

The product is in fp8_linear.py. Axes: O outputs, I inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.formats.weight import ExpertBank, StoredWeight

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""The largest e4m3 number."""

BLOCK_SIZE = 128
"""Side of a block that shares a scale: as in checkpoints, and one pass of the tensor cores."""

MIN_AMAX = 1e-10
"""Lower bound of a largest magnitude, so that all zeros have a scale too."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(StoredWeight):
    """A weight [O, I].

    data: [O, I] e4m3, contiguous. scale: float32, contiguous, [O] or [ceil(O/128), ceil(I/128)].
    input_scale: float32 [1], the scale that a checkpoint fixed for activations; None: by row.
    counters: int32 zeros that programs of one band of outputs count themselves with, and
    unit_scale: float32 1; on a GPU, whose kernels need them beside the weight.
    """

    kind: ClassVar[str] = "fp8"
    data: Tensor
    scale: Tensor
    input_scale: Tensor | None = None
    counters: Tensor | None = None
    unit_scale: Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        fine = self.scale.shape in {
            (outputs,),
            (-(-outputs // BLOCK_SIZE), -(-inputs // BLOCK_SIZE)),
        }
        assert fine, f"scales {list(self.scale.shape)} for a weight {[outputs, inputs]}"
        assert self.data.dtype == E4M3, self.data.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert self.input_scale is None or not self.block_size

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def block_size(self) -> int:
        """Inputs that share a scale: 128, or 0 when a whole row does."""
        return BLOCK_SIZE if self.scale.dim() == 2 else 0

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        scale = (
            expand_block_scales(self.scale, *self.shape) if self.block_size else self.scale[:, None]
        )
        return (self.data.float() * scale).to(dtype or torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8ExpertWeights(ExpertBank):
    """The same of X experts: data [X, O, I], scale [X, O] or [X, ceil(O/128), ceil(I/128)]."""

    kind: ClassVar[str] = "fp8"

    data: Tensor
    scale: Tensor
    input_scale: Tensor | None = None

    def __len__(self) -> int:
        return self.data.shape[0]

    def __getitem__(self, expert: int) -> Fp8Weight:
        return Fp8Weight(self.data[expert], self.scale[expert], self.input_scale)

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, inputs = self.data.shape
        return experts, outputs, inputs

    @property
    def block_size(self) -> int:
        """Inputs that share a scale: 128, or 0 when a whole row does."""
        return BLOCK_SIZE if self.scale.dim() == 3 else 0


def quantize_channels(weight: Tensor) -> Fp8Weight:
    """One scale per row of [O, I]."""
    wide = weight.float()
    scale = scale_of(wide.abs().amax(1))
    return Fp8Weight((wide * (1.0 / scale)[:, None]).to(E4M3), scale)


def quantize_blocks(weight: Tensor) -> Fp8Weight:
    """One scale per 128 x 128 block of [O, I]; blocks at the edges may be smaller."""
    wide = weight.float()
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide.abs(), (0, -columns % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    tiles = padded.view(-(-rows // BLOCK_SIZE), BLOCK_SIZE, -(-columns // BLOCK_SIZE), BLOCK_SIZE)
    scale = scale_of(tiles.amax((1, 3)))
    inverse = expand_block_scales(1.0 / scale, rows, columns)
    return Fp8Weight((wide * inverse).to(E4M3), scale)


def scale_of(largest: Tensor) -> Tensor:
    """The scale that maps a largest magnitude, float32, to the largest e4m3 number."""
    held = largest.clamp(min=MIN_AMAX)
    return held / torch.full_like(
        held, E4M3_MAX
    )  # a GPU would multiply by the reciprocal of a number


def expand_block_scales(scale: Tensor, rows: int, columns: int) -> Tensor:
    """A value per block [..] -> the same value at each element of [rows, columns]."""
    tall = scale.repeat_interleave(BLOCK_SIZE, 0)[:rows]
    return tall.repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
