"""Low-rank adapters of one layer, by slot, and the slots of a step's rows.

    y[t, o] = y[t, o] * factor[s, o] + shift[s, o] + sum_r b[s, r, o] * v[r]
    v[r]    = sum_i a[s, p, r, i] * x[t, i]

s is the slot of row t, and p the part of a fused layer (q, k, v; gate, up) that has output o: each
part has its own A. Kernels read no more ranks than a part of a slot has, so what a slot held before
needs no clearing. A part of rank 0 has no adapter: its outputs keep their bits.

An embedding is a layer whose x has a one at the token's id: its I is the vocabulary. Experts are
slots of their own: expert e of slot s is slot s * X + e.

Axes: S slots, P parts, R the largest rank, I inputs, O outputs of all parts, T rows of the step,
X experts (1 elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

RANK_STEP = 16
"""Tensor cores add so many products at a time: the ranks of a bank are a multiple of it."""


class LoraPart(NamedTuple):
    """The adapter of one part: a [r, I], b [r, O of the part], in the dtype of the bank.

    Of experts: [X, r, I] and [X, r, O]. factor, shift: float32 [O of the part]; None: 1, 0.
    """

    a: Tensor
    b: Tensor
    factor: Tensor | None = None
    shift: Tensor | None = None


class SlotCopy(NamedTuple):
    """A copy to a slot. place: [S, ..], in all slots. source: [..], on the host."""

    place: Tensor
    source: Tensor


def lora_part(a: Tensor, b: Tensor, dtype: torch.dtype) -> LoraPart:
    """Return A [.., r, I] and B [.., O, r], scaled already, as a bank stores them."""
    return LoraPart(a.to(dtype).contiguous(), b.to(dtype).mT.contiguous())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoraBank:
    """The adapters of one linear layer, or of the same layer of X experts: S is then S * X.

    a: [S, P, R, I]. b: [S, R, O], the outputs of all parts side by side. ranks: int32 [S, P].
    bounds: int32 [P + 1], where the outputs of each part begin, and O. parts: their numbers.
    factor, shift: float32 [S, O]; None: 1 and 0. With DoRA, factor is magnitude / norm, shift is
    bias * (1 - factor), and b contains the factor too.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    bounds: Tensor
    parts: tuple[int, ...]
    experts: int = 1
    factor: Tensor | None = None
    shift: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        slots: int,
        rank: int,
        inputs: int,
        parts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        experts: int = 1,
        factors: bool = False,
        shifts: bool = False,
    ) -> LoraBank:
        """A bank without adapters. rank: the largest of any; it is rounded up to RANK_STEP.

        factors, shifts: whether adapters may have them.
        """
        rank, outputs = -(-rank // RANK_STEP) * RANK_STEP, sum(parts)
        slots *= experts

        def rows(wanted: bool, value: float) -> Tensor | None:
            return torch.full((slots, outputs), value, device=device) if wanted else None

        return cls(
            a=torch.empty(slots, len(parts), rank, inputs, dtype=dtype, device=device),
            b=torch.empty(slots, rank, outputs, dtype=dtype, device=device),
            ranks=torch.zeros(slots, len(parts), dtype=torch.int32, device=device),
            bounds=torch.tensor(
                list(accumulate(parts, initial=0)), dtype=torch.int32, device=device
            ),
            parts=tuple(parts),
            experts=experts,
            factor=rows(factors, 1.0),
            shift=rows(shifts, 0.0),
        )

    @property
    def slots(self) -> int:
        """S, or S * X."""
        return self.a.shape[0]

    @property
    def rank(self) -> int:
        """The largest rank that a part can have."""
        return self.a.shape[2]

    @property
    def room(self) -> int:
        """The ranks between two slots or parts in memory: more than `rank` in a narrow view."""
        return self.b.stride(0) // self.b.shape[2]

    def narrow(self, rank: int) -> LoraBank:
        """A view for steps all of whose adapters have this rank at most: kernels are chosen, and
        cut their work, by the rank of the bank. rank: is rounded up to RANK_STEP."""
        rank = -(-rank // RANK_STEP) * RANK_STEP
        if rank >= self.rank:
            return self
        return replace(self, a=self.a[:, :, :rank], b=self.b[:, :rank])

    @property
    def numel(self) -> int:
        """Numbers of a and b."""
        return self.a.numel() + self.b.numel()

    def columns(self) -> Iterator[slice]:
        """The outputs of each part."""
        starts = accumulate(self.parts, initial=0)
        return (slice(start, start + size) for start, size in zip(starts, self.parts, strict=False))

    def write(self, slot: int, parts: Sequence[LoraPart | None]) -> None:
        """Replace the adapter of a slot, as copies() says. No kernel may read it meanwhile."""
        for place, source in self.copies(parts):
            place[slot].copy_(source, non_blocking=True)

    def copies(self, parts: Sequence[LoraPart | None]) -> Iterator[SlotCopy]:
        """Yield the copies that replace the adapter of a slot. None: this part has none.

        A slot of a bank of experts is that of all.
        """
        assert len(parts) == len(self.parts), f"{len(parts)} parts for a layer of {self.parts}"
        ranks = [0 if part is None else part.a.shape[-2] for part in parts]
        assert max(ranks) <= self.rank, f"ranks {ranks} do not fit a bank of rank {self.rank}"
        for p, (part, columns) in enumerate(zip(parts, self.columns(), strict=True)):
            if part is None:
                continue
            yield SlotCopy(self._by_slot(self.a)[..., p, : ranks[p], :], part.a)
            yield SlotCopy(self._by_slot(self.b)[..., : ranks[p], columns], part.b)
            for rows, row, default in (
                (self.factor, part.factor, 1.0),
                (self.shift, part.shift, 0.0),
            ):
                assert rows is not None or row is None, "a bank without factors or shifts"
                if rows is not None:
                    place = self._by_slot(rows)[..., columns]
                    default_row = torch.tensor(default).expand(place.shape[1:])
                    yield SlotCopy(place, default_row if row is None else row)
        place = self._by_slot(self.ranks)
        yield SlotCopy(place, torch.tensor(ranks, dtype=torch.int32).expand(place.shape[1:]))

    def _by_slot(self, tensor: Tensor) -> Tensor:
        """Experts on an axis of their own."""
        return tensor if self.experts == 1 else tensor.unflatten(0, (-1, self.experts))


@dataclass(frozen=True, slots=True, eq=False)
class LoraRows:
    """The slot of each row of a step, sorted once for all layers by quire.kernels.lora.assign_rows.

    slots: int32 [T]; negative: the row has no adapter. order: int32 [T], the rows by slot: those
    without an adapter first, then those of slot s at [starts[s], starts[s + 1]). starts: [S + 1].
    CUDA graphs and tapes read these tensors again, so their addresses stay.
    """

    slots: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def allocate(cls, rows: int, slots: int, device: torch.device) -> LoraRows:
        """Room for so many rows of which none has an adapter."""
        return cls(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.full((slots + 1,), rows, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> LoraRows:
        """The first rows of a larger step's room, to be sorted on their own."""
        return LoraRows(self.slots[:rows], self.order[:rows], self.starts)
