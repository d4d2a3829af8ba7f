"""A weight in two to eight bits as the native products of a CPU read it.

    codes   [ceil(O / 32), ceil(I / 32), bits, 32, 4]    bytes of planes of 4, 2 and 1 bits, or of 8
    factors [ceil(O / 32), G, 32]                        scales, offsets and zeros

A row of a plane of b bits holds the codes of 8 / b steps of 4 inputs: byte k of output o has in its
bits b * j those of input 4 * (row * 8 / b + j) + k. So one load of codes feeds as many outputs as
a vector has, and a weight of b bits takes b bits. Codes of 8 bits are stored minus 128.

Axes: O outputs, I inputs, G groups, S groups of groups, P panels of 32 outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.formats.grouped_weight import PLANES
from quire.kernels.formats.weight import ExpertBank, StoredWeight
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes, tensors_of
from quire.kernels.native.library import address_of, empty_huge_pages

PANEL, BLOCK = 32, 32
STORAGE = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int8: 4,
}  # fmt: skip
"""Dtypes of factors -> their code on the C++ side."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PanelCodes(StoredWeight):
    """A weight [O, I]. dtype: of the activations that it multiplies, float32 or bfloat16.

    scale, offset: as in WeightCodes, in panels: values [P, G or S, 32], codes [P, G, 32].
    zero: one for all, or zeros in panels. For 8 bits both are minus 128.
    table: float32 [2 ** bits], or [P * 32, 2 ** bits]. levels: int8 [16], table = levels * unit for
    products with rows of int8; None: those widen the table's weight.
    header: int64, the fields of the C++ struct CodesMatrix: addresses of the tensors here.
    """

    kind: ClassVar[str] = "panel_codes"
    codes: Tensor
    shape: tuple[int, int]
    bits: int
    group: int
    dtype: torch.dtype
    scale: GroupFactors | None
    offset: GroupFactors | None
    zero: int | Tensor
    table: Tensor | None
    levels: Tensor | None
    unit: float
    perm: Tensor | None
    header: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", self._header())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def in_integers(self) -> bool:
        """Whether it multiplies rows that are quantized to int8."""
        return self.dtype == torch.bfloat16 and (self.table is None or self.levels is not None)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the weight holds."""
        own = (self.scale, self.offset, self.zero, self.table, self.levels, self.perm)
        return tensors_of(self.codes, *own)

    def weight_codes(self) -> WeightCodes:
        """The weight with one byte per code, in rows."""
        outputs, inputs = self.shape
        q = unpack_code_panels(self.codes, self.bits)[:outputs, :inputs]
        shift, zero = (128 if self.bits == 8 else 0), self.zero
        if isinstance(zero, Tensor):
            zero = _rows(zero.to(torch.int16) + shift, outputs).to(torch.uint8)
        else:
            zero += shift
        return WeightCodes(
            q=(q ^ shift) if shift else q.contiguous(), bits=self.bits, group=self.group,
            scale=_rows_of(self.scale, outputs), offset=_rows_of(self.offset, outputs), zero=zero,
            table=self.table[:outputs] if self.own_table and self.table is not None else self.table,
            perm=self.perm,
        )  # fmt: skip

    @property
    def own_table(self) -> bool:
        """Whether each output has a table."""
        return self.table is not None and self.table.dim() == 2

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        return self.weight_codes().dequantize().to(dtype or torch.float32)

    def _header(self) -> Tensor:
        groups = -(-self.shape[1] // self.group)
        zeros = GroupFactors(self.zero) if isinstance(self.zero, Tensor) else None
        constant = self.zero if isinstance(self.zero, int) and self.table is None else 0
        fields = [
            self.codes.data_ptr(), *self.shape, self.bits, self.group, groups,
            *_fields(self.scale, groups), *_fields(self.offset, groups), *_fields(zeros, groups),
            constant, address_of(self.table), int(self.own_table), address_of(self.levels),
            torch.tensor(self.unit, dtype=torch.float64).view(torch.int64).item(),
            address_of(self.perm),
        ]  # fmt: skip
        return torch.tensor(fields, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PanelExperts(ExpertBank):
    """Weights of one layout. header: int64 [X, n], the headers of all."""

    kind: ClassVar[str] = PanelCodes.kind
    experts: tuple[PanelCodes, ...]
    header: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", torch.stack([one.header for one in self.experts]))

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, expert: int) -> PanelCodes:
        return self.experts[expert]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.experts), *self.experts[0].shape

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.experts)


def fits_panels(codes: WeightCodes) -> bool:
    """Whether the native products sum such groups: of 16, of 32 and its multiples, or of I."""
    inputs = codes.q.shape[-1]
    return codes.group >= inputs or codes.group == 16 or codes.group % BLOCK == 0


def pack_panel_experts(codes: Sequence[WeightCodes], dtype: torch.dtype) -> PanelExperts:
    """The same of several matrices, in one piece of memory: one may be smaller than a huge page."""
    (outputs, inputs), bits = codes[0].q.shape, codes[0].bits
    data = empty_code_panels(len(codes), outputs, inputs, bits)
    return PanelExperts(
        tuple(pack_panel_codes(one, dtype, part) for one, part in zip(codes, data, strict=True))
    )


def pack_panel_codes(
    codes: WeightCodes, dtype: torch.dtype, data: Tensor | None = None
) -> PanelCodes:
    """Pack the codes [O, I] of one matrix that fits_panels, for activations of a dtype.

    data: memory for the panels; None: new.
    """
    outputs, inputs = codes.q.shape
    data = pack_code_panels(codes.q ^ 128 if codes.bits == 8 else codes.q, codes.bits, data)
    zero, groups = codes.zero, -(-inputs // codes.group)
    if isinstance(zero, Tensor):
        zero = _panels(zero ^ 128 if codes.bits == 8 else zero, groups)
        zero = zero.view(torch.int8) if codes.bits == 8 else zero
    elif codes.bits == 8:
        zero -= 128
    table = None if codes.table is None else codes.table.float().contiguous()
    levels, unit = None, 1.0
    if table is not None and table.dim() == 2:
        table = pad(table, (0, 0, 0, -outputs % PANEL))
    elif table is not None and codes.bits <= 4:
        levels, unit = round_table(table)
    return PanelCodes(
        codes=data, shape=(outputs, inputs), bits=codes.bits, group=codes.group, dtype=dtype,
        scale=_panels_of(codes.scale, groups), offset=_panels_of(codes.offset, groups), zero=zero,
        table=table,
        levels=levels, unit=unit, perm=None if codes.perm is None else codes.perm.contiguous(),
    )  # fmt: skip


def empty_code_panels(count: int, outputs: int, inputs: int, bits: int) -> Tensor:
    """Memory of so many weights [O, I]: uint8 [count, P, ceil(I / 32), bits, 32, 4]."""
    shape = (count, -(-outputs // PANEL), -(-inputs // BLOCK), bits, PANEL, 4)
    return empty_huge_pages(math.prod(shape), torch.uint8).view(shape)


def pack_code_panels(q: Tensor, bits: int, data: Tensor | None = None) -> Tensor:
    """Codes of some bits, a byte each [O, I] -> uint8 [P, ceil(I / 32), bits, 32, 4], in `data`."""
    if data is None:
        (data,) = empty_code_panels(1, q.shape[0], q.shape[1], bits)
    q = pad(q, (0, -q.shape[1] % BLOCK, 0, -q.shape[0] % PANEL))
    steps = q.view(torch.int32).view(-1, PANEL, q.shape[1] // BLOCK, 8).permute(0, 2, 3, 1)
    words, row, shift = data.view(torch.int32), 0, 0
    for plane in PLANES[bits]:
        words[:, :, row : row + plane] = _pack_plane(steps, plane, shift).view_as(
            words[:, :, row : row + plane]
        )
        row, shift = row + plane, shift + plane
    return data


def round_table(table: Tensor) -> tuple[Tensor, float]:
    """A table of up to 16 values as int8 [16] and a unit: table = levels * unit, nearly.

    Exact for values that are integers times one number, as in FP4 and IQ4; else the largest value
    has the level 127 and others an error of at most half a unit.
    """
    largest = table.abs().max().clamp(min=1e-30)
    tops = torch.arange(1.0, 128.0, dtype=torch.float64)
    scaled = table.double() / largest.double() * tops[:, None]
    errors = (scaled - scaled.round()).abs().amax(1) / tops
    exact = (errors < 1e-7).nonzero()
    top = exact[0, 0] if len(exact) else errors.argmin()
    levels = scaled[top].round().to(torch.int8)
    return pad(levels, (0, 16 - len(levels))), float(largest.double() / tops[top])


def _pack_plane(steps: Tensor, bits: int, shift: int) -> Tensor:
    """Bits [shift, shift + bits) of four codes in a dword: [P, B, 8, 32] -> [P, B, bits, 32]."""
    if bits == 8:
        return steps
    mask, each = (1 << bits) - 1, 8 // bits
    parts = ((steps >> shift) & (mask * 0x01010101)).unflatten(2, (bits, each))
    out = parts[:, :, :, 0].clone()
    for j in range(1, each):
        out |= parts[:, :, :, j] << (bits * j)
    return out


def unpack_code_panels(codes: Tensor, bits: int) -> Tensor:
    """uint8 [P, B, bits, 32, 4] -> the codes, a byte each [P * 32, B * 32]."""
    out, row, shift = torch.zeros((), dtype=torch.uint8), 0, 0
    for plane in PLANES[bits]:
        rows, each = codes[:, :, row : row + plane], 8 // plane
        fields = [rows >> plane * j & (1 << plane) - 1 for j in range(each)]
        out = out | torch.stack(fields, 3).flatten(2, 3) << shift
        row, shift = row + plane, shift + plane
    return out.permute(0, 3, 1, 2, 4).reshape(-1, codes.shape[1] * BLOCK)


def _panels(numbers: Tensor, groups: int) -> Tensor:
    """[O, n] -> [P, n, 32], padded with zeros; [O, 1] -> [P, groups, 32]."""
    if numbers.shape[1] == 1:
        numbers = numbers.expand(-1, groups)
    rows = pad(numbers, (0, 0, 0, -numbers.shape[0] % PANEL))
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def _rows(panels: Tensor, outputs: int) -> Tensor:
    """The inverse of _panels."""
    return panels.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()


def _panels_of(factors: GroupFactors | None, groups: int) -> GroupFactors | None:
    if factors is None:
        return None
    if factors.codes is None:
        return GroupFactors(_panels(factors.values, groups))
    codes = factors.codes
    if codes.dtype not in STORAGE:
        codes = codes.to(torch.float16)  # e4m3: exact
    return GroupFactors(_panels(factors.values.float(), 1), _panels(codes, groups))


def _rows_of(factors: GroupFactors | None, outputs: int) -> GroupFactors | None:
    if factors is None:
        return None
    return GroupFactors(*(_rows(one, outputs) for one in factors.tensors))


def _fields(factors: GroupFactors | None, groups: int) -> list[int]:
    """The C++ struct Factors."""
    if factors is None:
        return [0] * 5
    inner, outer = factors.values, None
    if factors.codes is not None:
        inner, outer = factors.codes, factors.values
    assert inner.shape[1] == groups, f"{inner.shape[1]} factors of a row for {groups} groups"
    many = 0 if outer is None else outer.shape[1]
    share = 0 if outer is None else -(-groups // many)
    return [inner.data_ptr(), STORAGE[inner.dtype], many, share, address_of(outer)]
