"""Layout of the table of sampling parameters on the device: a line of numbers per slot.

One launch then serves any mix of rows, and a captured graph serves every request in a slot:

    word 0  temperature, float32 (0: greedy), below; top_k, int32 (0: all), above
    word 1  top_p, float64
    word 2  min_p, float32
    word 3  seed, 64 bits
    word 4  repetition penalty, float32, below; frequency penalty, float32, above
    word 5  presence penalty, float32

quire.sampling.slot_param_table fills the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

ROW_WORDS = 6
"""int64 words of one slot's line."""


def pack_row(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> np.ndarray:
    """One slot's line: [WORDS] int64. temperature 0: greedy."""
    out = np.zeros(ROW_WORDS, np.int64)
    halves, floats = out.view(np.int32), out.view(np.float32)
    floats[0], halves[1] = temperature, top_k
    out.view(np.float64)[1] = top_p
    floats[4] = min_p
    out.view(np.uint64)[3] = seed & (2**64 - 1)
    floats[8], floats[9], floats[10] = repetition, frequency, presence
    return out


def build_table(params: list[dict[str, Any]]) -> Tensor:
    """A table of such lines."""
    return torch.from_numpy(np.stack([pack_row(**one) for one in params]))


def unpack_sampling_params(lines: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Split lines [R, WORDS]: temperature, top_k, top_p, min_p, seed."""
    lines = lines.contiguous()
    halves, floats = lines.view(torch.int32), lines.view(torch.float32)
    return floats[:, 0], halves[:, 1], lines.view(torch.float64)[:, 1], floats[:, 4], lines[:, 3]


def unpack_penalties(lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split lines [R, WORDS]: repetition, frequency, presence."""
    floats = lines.contiguous().view(torch.float32)
    return floats[:, 8], floats[:, 9], floats[:, 10]
