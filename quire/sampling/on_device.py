"""Row arithmetic in torch operations, for tensors anywhere. quire.sampling.on_host does the same
faster on the CPU; a test holds the two together, bit for bit but for the last digit of exp.

Axes: B rows of a block, C columns of it. Shares are float64 in [0, 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 512
"""Sums are made of chunks of this size, so that no row's sum depends on how many rows there are."""


def exp_(x: Tensor) -> Tensor:
    """e**x in place. float32."""
    return x.exp_()


def chunk_sums(weights: Tensor) -> Tensor:
    """Running sums over each row's chunks. [B, width] float32 -> [B, width / CHUNK] float64."""
    rows, width = weights.shape
    return weights.view(rows, width // CHUNK, CHUNK).sum(-1).double().cumsum(-1)


def search(weights: Tensor, share: Tensor) -> Tensor:
    """The first column of each row at which the running sum is above share x total.

    weights: [B, C] >= 0. A column of weight 0 is never found, whatever the rounding.
    """
    return _find(weights.double().cumsum(-1), share)


def _find(running: Tensor, share: Tensor) -> Tensor:
    total = running[:, -1:]
    target = torch.minimum(share[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=running.shape[1] - 1)


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """search() in two stages, for long rows. [B, width] float32, [B] -> [B] int64."""
    rows, width = weights.shape
    running = chunk_sums(weights)
    chunk = _find(running, share)
    here = torch.arange(rows, device=weights.device)
    end = running[here, chunk]
    before = torch.where(chunk > 0, running[here, (chunk - 1).clamp_(min=0)], 0.0)
    rest = ((share * running[:, -1] - before) / (end - before)).clamp_(0.0, 1.0)
    inside = weights.view(rows, width // CHUNK, CHUNK)[here, chunk]
    return chunk * CHUNK + search(inside, rest)


def above(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of each row that are >= least, packed to the left in column order.

    x: [B, V] float32, least: [B]. Returns columns [B, C] int64 (0 where there are no more) and
    values [B, C] float32 (-inf there). C is at least 1.
    """
    rows, columns = (x >= least[:, None]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(x))
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows), device=x.device) - starts[rows]
    shape = (len(x), max(1, int(counts.max())))
    packed = torch.zeros(shape, dtype=torch.int64, device=x.device)
    values = torch.full(shape, -torch.inf, device=x.device)
    packed[rows, places] = columns
    values[rows, places] = x[rows, columns]
    return packed, values


def kth(values: Tensor, k: Tensor) -> Tensor:
    """The k-th greatest of each row; -inf where k is 0 or the row has fewer. [B, C], [B] -> [B]."""
    most = min(max(1, int(k.max())), values.shape[1])
    best = values.topk(most, dim=-1).values
    found = best.gather(1, (k - 1).clamp_(0, most - 1)[:, None])[:, 0]
    return torch.where((k > 0) & (k <= most), found, -torch.inf)


def cut_by_mass(weights: Tensor, top_p: Tensor, mass: Tensor) -> None:
    """Zero what lies past top_p x mass, greatest first, equal ones in order; top_p 1 cuts nothing.

    weights: [B, C] float32 >= 0, changed in place. top_p, mass: [B] float64.
    """
    limit = torch.where(top_p < 1, top_p * mass, math.inf)
    order = weights.sort(dim=-1, descending=True, stable=True).indices
    descending = weights.gather(1, order).double()
    before = descending.cumsum(-1) - descending
    kept = torch.zeros_like(weights, dtype=torch.bool)
    kept.scatter_(1, order, before < limit[:, None])
    weights.masked_fill_(~kept, 0.0)


def greater(x: Tensor, value: Tensor) -> Tensor:
    """How many of each row are strictly greater. x: [B, V], value: [B, 1] -> [B] int64."""
    return (x > value).sum(-1)


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value (the lowest of equals), and that value: NaN if any is.

    x: [B, V], any float dtype. Returns [B] int64, [B] float32.
    """
    ids = x.argmax(-1)
    top = x.gather(1, ids[:, None])[:, 0].float()
    return ids, torch.where(x.isnan().any(-1), torch.nan, top)
