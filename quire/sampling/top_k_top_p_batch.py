"""Top-k and top-p batch: the parameters of the random rows of a batch, made once per batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TopKTopPParams(NamedTuple):
    """The parameters of one row. Neutral: min_p 0, top_k 0, top_p 1."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    @property
    def needs_full_mass(self) -> bool:
        """top_p alone cuts, so its bound needs the mass of the whole row."""
        return self.top_p < 1 and not self.top_k and not self.min_p


@dataclass(slots=True)
class TopKTopPBatch:
    """Random rows that share one way of drawing: all plain (temperature only), or all cut."""

    row_indices: list[int]  # which rows of the logits, n of them
    device_rows: Tensor | None  # the same on the device; None: all, in order
    params: list[TopKTopPParams]  # [n]
    is_unfiltered: bool
    temperature: Tensor  # [n] float32
    has_temperature: bool  # some temperature is not 1


def build_top_k_top_p_batch(
    numbers: list[int], total: int, asked: list[TopKTopPParams], device: torch.device
) -> TopKTopPBatch:
    """Gather the parameters of rows `numbers` of `total`."""
    temperatures = [cut.temperature for cut in asked]
    return TopKTopPBatch(
        row_indices=numbers,
        device_rows=None if len(numbers) == total else torch.tensor(numbers, device=device),
        params=asked,
        is_unfiltered=all(cut.min_p == 0 and cut.top_k == 0 and cut.top_p >= 1 for cut in asked),
        temperature=torch.tensor(temperatures, device=device),
        has_temperature=any(t != 1.0 for t in temperatures),
    )
