"""A weight in two to eight bits, in the layout that any device can multiply.

Codes lie in planes of 8, 4, 2 and 1 bits, so that a weight of b bits takes b bits: 3 is a plane of
2 and one of 1. A byte of a plane has neighbours of a row, the first in its low bits. What gives
codes their values is that of WeightCodes. Axes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.kernels.formats.weight import StoredWeight
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes, tensors_of

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code -> bits of each plane, from the least significant."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupedWeight(StoredWeight):
    """A weight [O, I]. dtype: of the activations that it multiplies.

    planes: uint8 [..., O, ceil(I * bits / 8)] each. The other fields: see WeightCodes.
    """

    kind: ClassVar[str] = "grouped"
    planes: tuple[Tensor, ...]
    inputs: int
    bits: int
    group: int
    dtype: torch.dtype
    scale: GroupFactors | None = None
    offset: GroupFactors | None = None
    zero: int | Tensor = 0
    table: Tensor | None = None
    perm: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes[0].shape[-2], self.inputs

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the weight holds."""
        own = (self.scale, self.offset, self.zero, self.table, self.perm)
        return tensors_of(*self.planes, *own)

    def codes(self) -> WeightCodes:
        """The weight with one byte per code."""
        q = torch.zeros((), dtype=torch.uint8, device=self.device)
        at = 0
        for plane, bits in zip(self.planes, PLANES[self.bits], strict=True):
            q = q | (unpack_plane(plane, bits)[..., : self.inputs] << at)
            at += bits
        return WeightCodes(
            q=q, bits=self.bits, group=self.group, scale=self.scale, offset=self.offset,
            zero=self.zero, table=self.table, perm=self.perm,
        )  # fmt: skip

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        return self.codes().dequantize().to(dtype or torch.float32)


def pack_planes(codes: WeightCodes, dtype: torch.dtype) -> GroupedWeight:
    """Pack the codes of one matrix [O, I], for activations of a dtype."""
    planes, at = [], 0
    for bits in PLANES[codes.bits]:
        planes.append(pack_plane(codes.q >> at & (1 << bits) - 1, bits))
        at += bits
    return GroupedWeight(
        planes=tuple(planes), inputs=codes.q.shape[-1], bits=codes.bits, group=codes.group,
        dtype=dtype, scale=codes.scale, offset=codes.offset, zero=codes.zero, table=codes.table,
        perm=codes.perm,
    )  # fmt: skip


def pack_plane(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., I] below 2 ** bits -> uint8 [..., ceil(I * bits / 8)], the first value lowest."""
    each = 8 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % each))
    parts = padded.unflatten(-1, (-1, each))
    out = parts[..., 0].clone()
    for i in range(1, each):
        out |= parts[..., i] << i * bits
    return out


def unpack_plane(plane: Tensor, bits: int) -> Tensor:
    """The inverse of pack_plane, with the values of padding at the end."""
    width = 8
    while width > bits:  # the upper half of each byte moves to a byte of its own
        width //= 2
        words = plane.to(torch.int16)
        words |= words << 8 - width
        words &= ((1 << width) - 1) * 0x0101
        plane = words.view(torch.uint8)
    return plane
