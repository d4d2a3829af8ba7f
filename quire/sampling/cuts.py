"""The random rows of a batch: how each divides, cuts and draws. Data, made once per batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """What one row asks. Neutral: min_p 0, top_k 0, top_p 1."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    @property
    def by_mass(self) -> bool:
        """top_p alone cuts, so its bound needs the mass of the whole row."""
        return self.top_p < 1 and not self.top_k and not self.min_p


@dataclass(slots=True)
class Cuts:
    """Random rows that share one way of drawing: all plain (temperature only), or all cut."""

    numbers: list[int]  # which rows of the logits, n of them
    rows: Tensor | None  # the same on the device; None: all, in order
    asked: list[Cut]  # [n]
    plain: bool
    temperature: Tensor  # [n] float32
    divides: bool  # some temperature is not 1


def make_cuts(numbers: list[int], total: int, asked: list[Cut], device: torch.device) -> Cuts:
    """Gather what rows `numbers` of `total` ask."""
    temperatures = [cut.temperature for cut in asked]
    return Cuts(
        numbers=numbers,
        rows=None if len(numbers) == total else torch.tensor(numbers, device=device),
        asked=asked,
        plain=all(cut.min_p == 0 and cut.top_k == 0 and cut.top_p >= 1 for cut in asked),
        temperature=torch.tensor(temperatures, device=device),
        divides=any(t != 1.0 for t in temperatures),
    )
