"""Searches for the scales and offsets of groups that leave the least squared error.

Rounding q = round((x - offset) / scale) is best for given factors, and the factors of given q are a
linear least-squares problem. Each search rounds from several ranges, solves, rounds again with the
factors as they are stored, and keeps the best for each group.

Axes: N groups, g values of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""Elements searched at once: about ten float32 copies of them, and enough to keep a GPU busy."""
CPU_CHUNK_ELEMENTS = 1 << 18
"""The same on a CPU, where the copies then stay in its caches."""

Rounding = Callable[[Tensor], Tensor]
"""Factors as they are stored, in float32: rounded to the dtype of a file."""


def as_stored(dtype: torch.dtype) -> Rounding:
    """Return the rounding to a dtype; factors beyond its range become its largest number."""
    most = torch.finfo(dtype).max

    def rounded(factors: Tensor) -> Tensor:
        return factors.clamp(-most, most).to(dtype).float()

    return rounded


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows that have CHUNK_ELEMENTS at most."""
    most = min(CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS) if device.type == "cpu" else CHUNK_ELEMENTS
    step = max(most // max(columns, 1), 1)
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def divide(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and 0 where `by` is 0."""
    return torch.where(by == 0, 0.0, x / torch.where(by == 0, 1.0, by))


def weighted_error(x: Tensor, y: Tensor, importance: Tensor | None) -> Tensor:
    """sum((x - y)^2 * importance) of each group: [..., g] -> [...]."""
    square = (x - y).square()
    return (square if importance is None else square * importance).sum(-1)


def fit_scale(
    x: Tensor, low: int, high: int, stored: Rounding, importance: Tensor | None = None
) -> Tensor:
    """The scale [N] with the least error of scale * clamp(round(x / scale), low, high).

    x: [N, g] float32. low < 0 < high. The scale is negative where the largest magnitude is
    positive and `low` reaches further than `high`.
    """
    at = x.abs().argmax(-1, keepdim=True)
    extreme = x.gather(-1, at).squeeze(-1)
    reach = -low if -low > high else high
    best = torch.zeros_like(extreme)
    least = torch.full_like(extreme, torch.inf)
    sign = -1.0 if -low > high else 1.0
    for ratio in _ratios(reach):
        scale = stored(extreme * (sign * ratio / reach))
        for _ in range(2):
            q = divide(x, scale[:, None]).round().clamp(low, high)
            error = weighted_error(x, q * scale[:, None], importance)
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
            wq = q if importance is None else q * importance
            scale = stored(divide((wq * x).sum(-1), (wq * q).sum(-1)))
    return best


def fit_affine(
    x: Tensor,
    top: int,
    stored: Rounding,
    importance: Tensor | None = None,
    *,
    negative_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """(scale, offset), [N] each, with the least error of scale * q + offset, q in [0, top].

    x: [N, g] float32. negative_offset: the offset is 0 at most.
    """
    low, high = x.amin(-1), x.amax(-1)
    if negative_offset:
        low = low.clamp(max=0.0)
    best = torch.zeros_like(low), torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for ratio in _ratios(top):
        middle = (low + high) / 2
        offset = middle + (low - middle) * ratio
        if negative_offset:
            offset = torch.where(low == 0, low, offset.clamp(max=0.0))
        offset = stored(offset)
        scale = stored((high - low) * ratio / top)
        for _ in range(2):
            q = divide(x - offset[:, None], scale[:, None]).round().clamp(0, top)
            error = weighted_error(x, q * scale[:, None] + offset[:, None], importance)
            better = error < least
            best = torch.where(better, scale, best[0]), torch.where(better, offset, best[1])
            least = torch.where(better, error, least)
            scale, offset = _least_squares(x, q, importance, negative_offset)
            scale, offset = stored(scale), stored(offset)
    return best


def _least_squares(
    x: Tensor, q: Tensor, importance: Tensor | None, negative_offset: bool
) -> tuple[Tensor, Tensor]:
    """Scale and offset that approximate x by scale * q + offset best."""
    weight = torch.ones_like(x) if importance is None else importance.expand_as(x)
    wq = weight * q
    total, sum_q, sum_x = weight.sum(-1), wq.sum(-1), (weight * x).sum(-1)
    sum_qq, sum_qx = (wq * q).sum(-1), (wq * x).sum(-1)
    determinant = total * sum_qq - sum_q * sum_q
    scale = divide(total * sum_qx - sum_q * sum_x, determinant)
    offset = divide(sum_qq * sum_x - sum_q * sum_qx, determinant)
    if negative_offset:
        alone = divide(sum_qx, sum_qq)
        scale = torch.where(offset > 0, alone, scale)
        offset = offset.clamp(max=0.0)
    return scale.clamp(min=0.0), offset


def _ratios(levels: int) -> tuple[float, ...]:
    """Shares of the full range to begin at: few levels gain more from a clipped range."""
    if levels >= 100:
        return (1.0, 0.985, 0.97)
    if levels >= 24:
        return (1.0, 0.97, 0.94, 0.9, 0.85)
    if levels >= 6:
        return (1.07, 1.0, 0.94, 0.88, 0.82, 0.75, 0.67)
    return (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
