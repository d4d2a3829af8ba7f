"""A weight in two to eight bits, in tiles that GPU kernels read as one run of memory.

    codes  int16 [tiles of 64 outputs, blocks, words, 64, S]    S inputs are a slice: 32, or 16

A word holds 16 / b codes of b bits of one output. Field f of word j is input j of slice f, so that
one shift and one mask give a slice of the block in the order of x: nothing is interleaved. Codes of
3, 5, 6 and 8 bits are the sum of two planes (2 + 1, 4 + 1, 4 + 2, 4 + 4), and a block has as many
slices as a word of its narrowest plane. Numbers of groups are [tiles, groups, 64]. Codes of 8 bits
may be e4m3 floats; a group that has a NaN among them has NaN as its scale, since kernels decode
finite numbers only: its sums are NaN either way.

What gives codes their values is that of WeightCodes. Axes: O outputs, I inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.config.quant.held import TILE_GROUPS as GROUPS
from quire.config.quant.held import TILE_PLANES as PLANES
from quire.kernels.formats.weight import ExpertBank, StoredWeight
from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes, e4m3_table

TILE = 64
"""Outputs of a tile: the rows of Hopper's matrix instruction."""

BYTE_FORMS = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
"""Floats of a byte, which kernels read as bytes."""


class TiledFactors(NamedTuple):
    """GroupFactors of tiles: values [tiles, S, 64], and codes [tiles, G, 64] or None.

    share: groups that have one value. value_form, code_form: of BYTE_FORMS, for numbers held as
    bytes; "": they are of their dtype.
    """

    values: Tensor
    codes: Tensor | None
    share: int
    value_form: str
    code_form: str

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.codes is None else (self.values, self.codes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TiledWeight(StoredWeight):
    """A weight [O, I]. dtype: of the activations that it multiplies.

    low, high: the planes. group: inputs that share a scale, one of GROUPS; 0: all.
    table: float32 [16] or [O, 16]; table_words: int32 [8] or [tiles, 8, 64], bytes of its values in
    dtype: 4 words of low bytes, 4 of high ones. e4m3: codes are e4m3 floats, and have no table.
    counters: int32 zeros for parts of sums.
    The other fields: see WeightCodes, with groups in tiles.
    """

    kind: ClassVar[str] = "tiled"
    low: Tensor
    high: Tensor | None
    shape: tuple[int, int]
    bits: int
    group: int
    dtype: torch.dtype
    scale: TiledFactors | None
    offset: TiledFactors | None
    zero: int | Tensor
    table: Tensor | None
    table_words: Tensor | None
    e4m3: bool
    perm: Tensor | None
    counters: Tensor

    @property
    def device(self) -> torch.device:
        return self.low.device

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors())

    @property
    def slice_width(self) -> int:
        """Inputs of a slice."""
        return self.low.shape[-1]

    @property
    def slices(self) -> int:
        """Slices of a block."""
        return self.low.shape[2] * 16 // PLANES[self.bits][0]

    @property
    def blocks(self) -> int:
        """Blocks of inputs."""
        return self.low.shape[1]

    @property
    def groups(self) -> int:
        """Groups of a row, padding included."""
        return self.blocks * self.slices * self.slice_width // self.group if self.group else 1

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the weight holds."""
        for factors in (self.scale, self.offset):
            yield from factors.tensors if factors is not None else ()
        others = (self.low, self.high, self.zero, self.table, self.table_words, self.perm)
        for one in (*others, self.counters):
            if isinstance(one, Tensor):
                yield one

    def codes(self) -> WeightCodes:
        """The weight with one byte per code, in groups of the kernels."""
        outputs, inputs = self.shape
        low_bits, high_bits = PLANES[self.bits]
        q = _unpack_plane(self.low, low_bits)
        if self.high is not None:
            q = q | _unpack_plane(self.high, high_bits) << low_bits
        zero = self.zero
        if isinstance(zero, Tensor):
            zero = _rows_of(zero, outputs)
        return WeightCodes(
            q=q[:outputs, :inputs].contiguous(), bits=self.bits, group=self.group or inputs,
            scale=_untile_factors(self.scale, outputs),
            offset=_untile_factors(self.offset, outputs),
            zero=zero, table=e4m3_table(q.device) if self.e4m3 else self.table, e4m3=self.e4m3,
            perm=self.perm,
        )  # fmt: skip

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [O, I], float32 by default, as a new tensor."""
        codes, (_, inputs) = self.codes(), self.shape
        if not self.group:
            return codes.dequantize().to(dtype or torch.float32)
        spare = self.groups * self.group - inputs  # groups of padding have factors too
        wide = replace(codes, q=pad(codes.q, (0, spare)), perm=None).dequantize()[:, :inputs]
        if self.perm is not None:
            plain = torch.empty_like(wide)
            plain[:, self.perm.long()] = wide
            wide = plain
        return wide.to(dtype or torch.float32, copy=True)


@dataclass(frozen=True, slots=True, eq=False)
class TiledExperts(ExpertBank):
    """The same of X experts: `bank` has the tiles of expert 0, then those of expert 1, ..."""

    kind: ClassVar[str] = "tiled"
    bank: TiledWeight
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.bank.nbytes

    def __getitem__(self, expert: int) -> TiledWeight:
        experts, outputs, inputs = self.shape
        tiles = self.bank.low.shape[0] // experts
        first = expert * tiles

        def pick(one: Tensor | None) -> Tensor | None:
            return None if one is None else one[first : first + tiles]

        def factors(one: TiledFactors | None) -> TiledFactors | None:
            if one is None:
                return None
            return one._replace(values=one.values[first : first + tiles], codes=pick(one.codes))

        bank, zero = self.bank, self.bank.zero
        own = bank.table is not None and bank.table.dim() > 1
        rows = slice(first * TILE, first * TILE + outputs)
        return replace(
            bank, shape=(outputs, inputs), low=bank.low[first : first + tiles],
            high=pick(bank.high), scale=factors(bank.scale), offset=factors(bank.offset),
            zero=zero[first : first + tiles] if isinstance(zero, Tensor) else zero,
            table=bank.table[rows] if own and bank.table is not None else bank.table,
            table_words=pick(bank.table_words) if own else bank.table_words,
        )  # fmt: skip


def kernel_group(codes: WeightCodes) -> int | None:
    """Inputs that share a scale in the kernels' layout; 0: all; None: they have no such layout."""
    if codes.group >= codes.q.shape[-1]:
        return 0
    return next((size for size in GROUPS if codes.group % size == 0), None)


def pack_tiles(codes: WeightCodes, dtype: torch.dtype) -> TiledWeight:
    """Pack the codes of one matrix [O, I], for activations of a dtype."""
    assert codes.q.dim() == 2, codes.q.shape
    return _pack(codes, dtype)


def pack_tiled_experts(codes: WeightCodes, dtype: torch.dtype) -> TiledExperts:
    """Pack the codes of experts [X, O, I]."""
    experts, outputs, inputs = codes.q.shape
    tall = -outputs % TILE

    def flat(one: Tensor) -> Tensor:
        return pad(_bytes_of(one)[1], (0, 0, 0, tall)).view(one.dtype).flatten(0, 1)

    def factors(one: GroupFactors | None) -> GroupFactors | None:
        return None if one is None else GroupFactors(*(flat(t) for t in one.tensors))

    zero, table = codes.zero, codes.table
    bank = _pack(
        replace(
            codes, q=flat(codes.q), scale=factors(codes.scale), offset=factors(codes.offset),
            zero=flat(zero) if isinstance(zero, Tensor) else zero,
            table=flat(table) if table is not None and table.dim() > 1 else table,
        ),
        dtype,
    )  # fmt: skip
    return TiledExperts(bank, (experts, outputs, inputs))


def _pack(codes: WeightCodes, dtype: torch.dtype) -> TiledWeight:
    group = kernel_group(codes)
    assert group is not None, f"groups of {codes.group} inputs"
    outputs, inputs = codes.q.shape
    table = None if codes.e4m3 else codes.table
    bits = 4 if table is not None else codes.bits  # tables are looked up by 4 bits
    low_bits, high_bits = PLANES[bits]
    wide = 16 if group == 16 else 32
    slices = 16 // min(low_bits, high_bits or low_bits)
    q = pad(codes.q, (0, -inputs % (slices * wide), 0, -outputs % TILE))
    tiles, width = q.shape[0] // TILE, q.shape[1]
    groups = width // group if group else 1
    scale = _with_nan(codes) if codes.e4m3 else codes.scale
    if table is not None:
        table = pad(table.float(), (0, 16 - table.shape[-1]))
    zero = codes.zero
    if isinstance(zero, Tensor):
        zero = _tile(_spread(zero, codes, group), groups)
    return TiledWeight(
        low=_pack_plane(q & (1 << low_bits) - 1, low_bits, slices, wide),
        high=_pack_plane(q >> low_bits, high_bits, slices, wide) if high_bits else None,
        shape=(outputs, inputs), bits=bits, group=group, dtype=dtype,
        scale=_tile_factors(scale, codes, group, groups),
        offset=_tile_factors(codes.offset, codes, group, groups),
        zero=zero, table=table, table_words=None if table is None else _words(table, dtype),
        e4m3=codes.e4m3, perm=codes.perm,
        counters=torch.zeros(tiles, dtype=torch.int32, device=q.device),
    )  # fmt: skip


def _with_nan(codes: WeightCodes) -> GroupFactors:
    """The scales of e4m3 codes [O, I], NaN where a group has a NaN."""
    assert codes.scale is not None, "e4m3 codes without scales"
    width = codes.q.shape[1]
    found = pad(codes.q & 127 == 127, (0, -width % codes.group)).unflatten(1, (-1, codes.group))
    values = codes.scale.values
    return GroupFactors(torch.where(found.any(-1), float("nan"), values).to(values.dtype))


def _pack_plane(q: Tensor, bits: int, slices: int, wide: int) -> Tensor:
    """uint8 [O, I] below 2 ** bits -> int16 [O / 64, blocks, words, 64, wide]."""
    fields = 16 // bits
    parts = q.unflatten(1, (-1, slices // fields, fields, wide)).unflatten(0, (-1, TILE))
    out = parts[:, :, :, :, 0].to(torch.int16)
    for i in range(1, fields):
        out |= parts[:, :, :, :, i].to(torch.int16) << i * bits
    return out.permute(0, 2, 3, 1, 4).contiguous()


def _unpack_plane(plane: Tensor, bits: int) -> Tensor:
    """The inverse: uint8 [O, I], padding included."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=plane.device)
    parts = plane[..., None, :] >> shifts[:, None] & (1 << bits) - 1
    tiles, blocks, words, fields, rows, wide = parts.transpose(3, 4).shape
    q = parts.permute(0, 3, 1, 2, 4, 5).to(torch.uint8)
    return q.reshape(tiles * rows, blocks * words * fields * wide)


def _spread(numbers: Tensor, codes: WeightCodes, group: int) -> Tensor:
    """[O, G] of the source's groups, or [O, 1] -> [O, G'] of the kernels'."""
    if not group:
        return numbers
    if numbers.shape[1] == 1 < -(-codes.q.shape[1] // codes.group):
        numbers = numbers.expand(-1, -(-codes.q.shape[1] // codes.group))
    repeats = codes.group // group
    return numbers.repeat_interleave(repeats, 1) if repeats > 1 else numbers


def _tile(numbers: Tensor, groups: int) -> Tensor:
    """[O, G] -> [ceil(O / 64), groups, 64], the rest zero."""
    padded = pad(numbers, (0, groups - numbers.shape[1], 0, -numbers.shape[0] % TILE))
    return padded.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _tile_factors(
    factors: GroupFactors | None, codes: WeightCodes, group: int, groups: int
) -> TiledFactors | None:
    if factors is None:
        return None
    value_form, values = _bytes_of(factors.values)
    if factors.codes is None:
        return TiledFactors(_tile(_spread(values, codes, group), groups), None, 1, value_form, "")
    code_form, small = _bytes_of(factors.codes)
    given = -(-codes.q.shape[1] // codes.group)
    share = -(-given // values.shape[1]) * (codes.group // group if group else 1)
    tiled = _tile(_spread(small, codes, group), groups)
    return TiledFactors(_tile(values, -(-groups // share)), tiled, share, value_form, code_form)


def _bytes_of(numbers: Tensor) -> tuple[str, Tensor]:
    """(form, numbers): floats of a byte as uint8, for which torch has all functions."""
    form = next((name for name, dtype in BYTE_FORMS.items() if dtype == numbers.dtype), "")
    return form, numbers.view(torch.uint8) if form else numbers


def _rows_of(tiled: Tensor, outputs: int) -> Tensor:
    """[tiles, G, 64] -> [O, G]."""
    return tiled.transpose(1, 2).flatten(0, 1)[:outputs]


def _untile_factors(factors: TiledFactors | None, outputs: int) -> GroupFactors | None:
    if factors is None:
        return None
    values = _rows_of(factors.values, outputs)
    if factors.codes is None:
        return GroupFactors(_floats_of(factors.value_form, values))
    small = _rows_of(factors.codes, outputs)
    spread = values.repeat_interleave(factors.share, 1)[:, : small.shape[1]]
    return GroupFactors(
        _floats_of(factors.value_form, spread), _floats_of(factors.code_form, small)
    )


def _floats_of(form: str, numbers: Tensor) -> Tensor:
    """The inverse of _bytes_of; float32, for which torch has all functions."""
    return numbers.view(BYTE_FORMS[form]).float() if form else numbers


def _words(table: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [..., 16] -> the bytes of its values in dtype: [8] int32, or [tiles, 8, 64]."""
    half = dtype if dtype.itemsize == 2 else torch.bfloat16
    both = table.to(half)[..., None].view(torch.uint8)  # [..., 16, 2]
    words = both.transpose(-1, -2).contiguous().flatten(-2).view(torch.int32)
    return words if words.dim() == 1 else _tile(words, 8)
