"""A quantized matrix as its integers: what every stored format is read into, and packed from.

    w[o, i] = value(q[o, i]) * scale[o, g] + offset[o, g]        g = i // group
    value(q) = q - zero[o, g], or table[q], or table[o, q]

A method of quire.quant unpacks a layer's tensors into WeightCodes, one byte a weight, and
`quire.kernels.grouped_linear.pack` lays them out for the kernels of their device. So a new format
on disk has no kernel, and a new kernel reads no format. Banks of experts have a leading axis X.

Axes: O outputs, I inputs, G = ceil(I / group), S groups of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupFactors:
    """One number per output and group: `values`, or `codes` times one value per several groups.

    values: [..., O, G], or [..., O, S] beside codes; float16, bfloat16 or float32.
    codes: [..., O, G] int8, uint8 or float8_e4m3fn; G / S of them share a value. None: no codes.
    """

    values: Tensor
    codes: Tensor | None = None

    def expand(self) -> Tensor:
        """The numbers in float32, [..., O, G]: exact for every format that is read."""
        wide = self.values.float()
        if self.codes is None:
            return wide
        share = -(-self.codes.shape[-1] // wide.shape[-1])
        return self.codes.float() * spread_groups(wide, share, self.codes.shape[-1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.codes is None else (self.values, self.codes)


def tensors_of(*values: Tensor | GroupFactors | int | None) -> Iterator[Tensor]:
    """The tensors among the fields of a weight."""
    for one in values:
        if isinstance(one, GroupFactors):
            yield from one.tensors
        elif isinstance(one, Tensor):
            yield one


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightCodes:
    """A weight [O, I], or weights [X, O, I], as codes and what gives them their values.

    q: uint8 [..., O, I], each below 2 ** bits. bits: 2, 3, 4, 5, 6 or 8.
    group: inputs that share a scale: 16, 32, 64, 128 or another divisor of I, or I itself.
    scale: float factors; None: 1. offset: the same, added; None: 0.
    zero: the code of zero: an integer, or uint8 [..., O, G]. Not with a table.
    table: float32 values of the codes, [2 ** bits], or [..., O, 2 ** bits] of each output.
    e4m3: whether the codes are e4m3 floats; `table` has their values.
    perm: int32 [I]: column i of q multiplies x[:, perm[i]] (desc_act of GPTQ). None: i itself.
    Experts may have one each, [X, I].
    """

    q: Tensor
    bits: int
    group: int
    scale: GroupFactors | None = None
    offset: GroupFactors | None = None
    zero: int | Tensor = 0
    table: Tensor | None = None
    e4m3: bool = False
    perm: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The plain matrix in float32, [..., O, I], its columns in the order of x."""
        inputs = self.q.shape[-1]
        if self.table is None:
            zero = self.zero
            if isinstance(zero, Tensor):
                zero = spread_groups(zero.float(), self.group, inputs)
            value = self.q.float() - zero
        elif self.table.dim() == 1:
            value = self.table[self.q.int()]
        else:
            value = self.table.gather(-1, self.q.long())
        if self.scale is not None:
            value = value * spread_groups(self.scale.expand(), self.group, inputs)
        if self.offset is not None:
            value = value + spread_groups(self.offset.expand(), self.group, inputs)
        if self.perm is None:
            return value
        perm = self.perm.long()
        perm = perm if perm.dim() == 1 else perm[:, None]  # of one expert
        return torch.empty_like(value).scatter_(-1, perm.expand(value.shape), value)


def e4m3_table(device: torch.device) -> Tensor:
    """The values of the 256 codes, float32; two are NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()


def spread_groups(numbers: Tensor, group: int, inputs: int) -> Tensor:
    """[..., G] -> [..., inputs]: each number for the inputs of its group."""
    if numbers.shape[-1] == 1:
        return numbers.expand(*numbers.shape[:-1], inputs)
    return numbers.repeat_interleave(group, -1)[..., :inputs]
