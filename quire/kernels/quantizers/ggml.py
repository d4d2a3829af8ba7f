"""Quantizes to the block types of GGUF files.

Simple types have a group of 32 with float16 factors. K-quants have blocks of 256: the factors of
their groups of 16 or 32 are integers times a float16 of the block.

    Q4_0 Q5_0 Q8_0      d * (q - zero)
    Q4_1 Q5_1           d * q + m
    Q3_K Q6_K           d * sc * (q - zero)
    Q2_K Q4_K Q5_K      d * sc * q - dmin * mn

First each group gets the factors with the least squared error (search.py). In a K-quant they are
then rounded to the block's integers, each integer is moved by one where that leaves less error, the
two float16 are solved anew for the chosen codes, and the codes are rounded a last time.

Source: the layouts of ggml's blocks, https://github.com/ggml-org/ggml. Axes: O outputs, I inputs,
N blocks or groups, K groups of a block, g values of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.search import (
    as_stored,
    divide,
    fit_affine,
    fit_scale,
    row_chunks,
    weighted_error,
)

SIMPLE_GROUP, SUPER_BLOCK = 32, 256
HALF = as_stored(torch.float16)


@dataclass(frozen=True, slots=True)
class GgmlLayout:
    """The numbers of a block type.

    factor_range: of the integers that are a group's factors; None: a simple type.
    """

    bits: int
    group: int
    zero: int  # 0: the type has offsets
    has_offset: bool
    factor_range: tuple[int, int] | None = None


LAYOUTS = {
    "Q4_0": GgmlLayout(4, 32, 8, False),
    "Q4_1": GgmlLayout(4, 32, 0, True),
    "Q5_0": GgmlLayout(5, 32, 16, False),
    "Q5_1": GgmlLayout(5, 32, 0, True),
    "Q8_0": GgmlLayout(8, 32, 128, False),
    "Q2_K": GgmlLayout(2, 16, 0, True, (0, 15)),
    "Q3_K": GgmlLayout(3, 16, 4, False, (-32, 31)),
    "Q4_K": GgmlLayout(4, 32, 0, True, (0, 63)),
    "Q5_K": GgmlLayout(5, 32, 0, True, (0, 63)),
    "Q6_K": GgmlLayout(6, 16, 32, False, (-128, 127)),
}


def quantize_ggml(kind: str, weight: Tensor, importance: Tensor | None = None) -> WeightCodes:
    """Quantize a weight [O, I], float32, to a type of LAYOUTS.

    I: a multiple of 32, or of 256 for K-quants. importance: float32 [I], how much the squared error
    of each input counts.
    """
    layout = LAYOUTS[kind]
    outputs, inputs = weight.shape
    unit = SUPER_BLOCK if layout.factor_range else SIMPLE_GROUP
    assert inputs % unit == 0, f"{inputs} inputs are not whole blocks of {unit}"
    find = _find_k_factors if layout.factor_range else _find_simple_factors
    parts = []
    for rows in row_chunks(outputs, inputs, weight.device):
        x = weight[rows].float().unflatten(-1, (-1, unit // layout.group, layout.group))
        weights = None
        if importance is not None:
            weights = importance.float().unflatten(-1, x.shape[1:]).expand_as(x)
            weights = weights.reshape(-1, *x.shape[2:])
        parts.append(find(layout, x.reshape(-1, *x.shape[2:]), weights))
    q, scale, offset = (_joined(column) for column in zip(*parts))
    assert q is not None
    return WeightCodes(
        q=q[0].view(outputs, inputs),
        bits=layout.bits,
        group=layout.group,
        scale=_factors(scale, outputs, 1),
        offset=_factors(offset, outputs, -1) if layout.has_offset else None,
        zero=layout.zero,
    )


Found = tuple[Tensor, "Tensor | None"]
"""Factors of groups [N, K], or of blocks [N, 1] beside their integers [N, K]."""


def _joined(column: tuple[Found | None, ...]) -> Found | None:
    """The parts of all rows as one."""
    there = [one for one in column if one is not None]
    if not there:
        return None
    codes = [one[1] for one in there if one[1] is not None]
    return torch.cat([one[0] for one in there]), torch.cat(codes) if codes else None


def _factors(found: Found | None, outputs: int, sign: int) -> GroupFactors:
    assert found is not None
    values, codes = found
    values = values.half().view(outputs, -1)
    if codes is None:
        return GroupFactors(values)
    return GroupFactors(sign * values, codes.view(outputs, -1))


def _find_simple_factors(
    layout: GgmlLayout, x: Tensor, importance: Tensor | None
) -> tuple[Found, Found, Found | None]:
    """x: [N, 1, g] -> the codes, the scales, and the offsets if there are any."""
    x = x.flatten(0, 1)
    importance = None if importance is None else importance.flatten(0, 1)
    top = (1 << layout.bits) - 1
    if layout.has_offset:
        scale, offset = fit_affine(x, top, HALF, importance)
        q = divide(x - offset[:, None], scale[:, None]).round().clamp(0, top)
        return (q.to(torch.uint8), None), (scale, None), (offset, None)
    low, high = (-127, 127) if layout.bits == 8 else (-layout.zero, layout.zero - 1)
    scale = fit_scale(x, low, high, HALF, importance)
    q = divide(x, scale[:, None]).round().clamp(low, high) + layout.zero
    return (q.to(torch.uint8), None), (scale, None), None


def _find_k_factors(
    layout: GgmlLayout, x: Tensor, importance: Tensor | None
) -> tuple[Found, Found, Found | None]:
    """x: [N, K, g] -> the codes; per block the scale and its integers; the same of the mins."""
    assert layout.factor_range is not None
    low, high = layout.factor_range
    flat = x.flatten(0, 1)
    weights = None if importance is None else importance.flatten(0, 1)
    exact = as_stored(torch.float32)
    if layout.has_offset:
        top = (1 << layout.bits) - 1
        scale, offset = fit_affine(flat, top, exact, weights, negative_offset=True)
        found = _KBlocks(layout, x, importance)
        scale, minimum = scale.view(x.shape[:2]), -offset.view(x.shape[:2])
        found.start(
            HALF(scale.amax(1, True) / high), scale, HALF(minimum.amax(1, True) / high), minimum
        )
    else:
        scale = fit_scale(flat, -layout.zero, layout.zero - 1, exact, weights).view(x.shape[:2])
        found = _KBlocks(layout, x, importance)
        extreme = scale.gather(1, scale.abs().argmax(1, True))
        found.start(HALF(extreme / low), scale, None, None)
    found.move_integers()
    found.solve_blocks()
    found.move_integers()
    dtype = torch.uint8 if low == 0 else torch.int8
    q = found.round(found.sc, found.mn) + layout.zero
    mins = None
    if found.mn is not None and found.dmin is not None:
        mins = found.dmin, found.mn.to(dtype)
    return (q.to(torch.uint8), None), (found.d, found.sc.to(dtype)), mins


class _KBlocks:
    """Blocks [N, K, g] under search: the float16 and the integers of each."""

    d: Tensor  # [N, 1]
    sc: Tensor  # [N, K]
    dmin: Tensor | None = None
    mn: Tensor | None = None

    def __init__(self, layout: GgmlLayout, x: Tensor, importance: Tensor | None) -> None:
        assert layout.factor_range is not None
        self.x, self.importance = x, importance
        self.least, self.most = layout.factor_range
        top = (1 << layout.bits) - 1
        self.low, self.high = -layout.zero, top - layout.zero

    def start(self, d: Tensor, scale: Tensor, dmin: Tensor | None, minimum: Tensor | None) -> None:
        """Round the factors of groups to integers."""
        self.d, self.sc = d, divide(scale, d).round().clamp(self.least, self.most)
        if dmin is not None and minimum is not None:
            self.dmin = dmin
            self.mn = divide(minimum, dmin).round().clamp(self.least, self.most)

    def round(self, sc: Tensor, mn: Tensor | None) -> Tensor:
        """The best codes for these integers, without the zero: [N, K, g]."""
        x = self.x
        if mn is not None and self.dmin is not None:
            x = x + (self.dmin * mn)[..., None]
        return divide(x, (self.d * sc)[..., None]).round().clamp(self.low, self.high)

    def values(self, q: Tensor, sc: Tensor, mn: Tensor | None) -> Tensor:
        y = q * (self.d * sc)[..., None]
        return y if mn is None or self.dmin is None else y - (self.dmin * mn)[..., None]

    def errors(self, sc: Tensor, mn: Tensor | None) -> Tensor:
        """The error of each group [N, K]."""
        return weighted_error(self.x, self.values(self.round(sc, mn), sc, mn), self.importance)

    def move_integers(self) -> None:
        """Move each group's integers by one where that leaves less error."""
        sc, mn = self.sc, self.mn
        least = self.errors(sc, mn)
        best_sc, best_mn = sc, mn
        moves = (-1, 0, 1) if mn is not None else (0,)
        for ds in (-1, 0, 1):
            for dm in moves:
                if not ds and not dm:
                    continue
                moved = (sc + ds).clamp(self.least, self.most)
                moved_mn = None if mn is None else (mn + dm).clamp(self.least, self.most)
                error = self.errors(moved, moved_mn)
                better = error < least
                least = torch.where(better, error, least)
                best_sc = torch.where(better, moved, best_sc)
                if best_mn is not None and moved_mn is not None:
                    best_mn = torch.where(better, moved_mn, best_mn)
        self.sc, self.mn = best_sc, best_mn

    def solve_blocks(self) -> None:
        """Solve the float16 of each block for its codes, and keep them where they are better."""
        q = self.round(self.sc, self.mn)
        x = self.x.flatten(1)
        a = (q * self.sc[..., None]).flatten(1)
        weight = torch.ones_like(x) if self.importance is None else self.importance.flatten(1)
        aa, ax = (weight * a * a).sum(1, True), (weight * a * x).sum(1, True)
        before = self.errors(self.sc, self.mn).sum(1, True)
        old = self.d, self.dmin
        if self.mn is None:
            self.d = HALF(divide(ax, aa))
        else:
            b = -self.mn[..., None].expand_as(q).flatten(1)
            bb, bx = (weight * b * b).sum(1, True), (weight * b * x).sum(1, True)
            ab = (weight * a * b).sum(1, True)
            determinant = aa * bb - ab * ab
            singular = determinant <= 1e-6 * aa * bb
            determinant = torch.where(singular, 0.0, determinant)
            d = torch.where(singular, old[0], divide(bb * ax - ab * bx, determinant))
            assert old[1] is not None
            dmin = torch.where(singular, old[1], divide(aa * bx - ab * ax, determinant))
            self.d, self.dmin = HALF(d.clamp(min=0.0)), HALF(dmin.clamp(min=0.0))
        worse = self.errors(self.sc, self.mn).sum(1, True) >= before
        self.d = torch.where(worse, old[0], self.d)
        if self.dmin is not None and old[1] is not None:
            self.dmin = torch.where(worse, old[1], self.dmin)
