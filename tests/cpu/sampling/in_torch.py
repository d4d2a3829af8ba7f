"""Row arithmetic in torch operations: what quire.sampling.numpy_ops must agree with, bit for bit but
for the last digit of exp. Batched and plain, where on_host is fast.

Axes: B rows of a block, V vocab, C columns that may be kept. Shares are float64 in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.sampling.numpy_ops import BOUND_MARGIN, CHUNK, GROUP_SIZE, MIN_FLOAT32
from quire.sampling.top_k_top_p_batch import TopKTopPParams


def exp_(x: Tensor) -> Tensor:
    """e**x in place. float32."""
    return x.exp_()


def chunk_sums(weights: Tensor) -> Tensor:
    """Running sums over each row's chunks. [B, width] float32 -> [B, width / CHUNK] float64."""
    rows, width = weights.shape
    return weights.view(rows, width // CHUNK, CHUNK).sum(-1).double().cumsum(-1)


def draw(weights: Tensor, share: Tensor) -> Tensor:
    """The first column of each row at which the running sum is above share x total.

    weights: [B, width] float32 >= 0. A column of weight 0 is never found, whatever the rounding.
    """
    rows, width = weights.shape
    running = chunk_sums(weights)
    chunk = _find(running, share)
    here = torch.arange(rows, device=weights.device)
    end = running[here, chunk]
    before = torch.where(chunk > 0, running[here, (chunk - 1).clamp_(min=0)], 0.0)
    rest = ((share * running[:, -1] - before) / (end - before)).clamp_(0.0, 1.0)
    inside = weights.view(rows, width // CHUNK, CHUNK)[here, chunk].double().cumsum(-1)
    return torch.where(end > before, chunk * CHUNK + _find(inside, rest), 0)


def _find(running: Tensor, share: Tensor) -> Tensor:
    total = running[:, -1:]
    target = torch.minimum(share[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=running.shape[1] - 1)


def draw_filtered(
    z: Tensor, buffer: Tensor, asked: Sequence[TopKTopPParams], share: Tensor
) -> Tensor:
    """Draw among what the cuts leave of each row, in column order. [B] int64.

    z: [B, V] float32, best 0. buffer: [B, width], 0 from V on.
    """
    columns, weights = filter_rows(z, buffer, asked)
    at = _find(weights.double().cumsum(-1), share)
    return columns.gather(1, at[:, None])[:, 0]


def filter_rows(
    z: Tensor, buffer: Tensor, asked: Sequence[TopKTopPParams]
) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of each row of z (see choose).

    Returns columns [B, C] in order and weights [B, C] float32, 0 where cut off or padding.
    """
    min_p, top_k, top_p, by_mass = (
        torch.tensor(values, device=z.device)
        for values in zip(*((c.min_p, c.top_k, c.top_p, c.needs_full_mass) for c in asked))
    )
    weights = buffer[:, : z.shape[1]].copy_(z).exp_()
    mass = chunk_sums(buffer)[:, -1]
    least = torch.where(min_p > 0, min_p.log() - BOUND_MARGIN, MIN_FLOAT32)
    least = torch.where(top_k > 0, torch.maximum(least, lower_bounds(z, top_k)), least)
    # All tokens rarer than (1 - p) / V together are less than 1 - p.
    rare = ((1 - top_p.double()) * mass / z.shape[1]).log().float() - BOUND_MARGIN
    least = torch.where(by_mass, rare, least)
    columns, values = above(z, least)
    weights = torch.where(values > -torch.inf, weights.gather(1, columns), 0.0)
    weights.masked_fill_(weights < min_p[:, None], 0.0)
    weights.masked_fill_(values < _kth(values, top_k)[:, None], 0.0)
    left = torch.where(by_mass, mass, weights.double().cumsum(-1)[:, -1])
    _cut_by_mass(weights, top_p.double(), left)
    return columns, weights


def lower_bounds(x: Tensor, counts: Tensor) -> Tensor:
    """A value per row that at least counts[row] columns reach, and not many more. float32.

    Source: ours. The k-th largest of the maxima of groups is at most the k-th largest of all.
    """
    groups = x.shape[1] // GROUP_SIZE
    most = max(1, int(counts.max()))
    if most > groups:
        return torch.full((len(x),), MIN_FLOAT32, device=x.device)
    tops = x[:, : groups * GROUP_SIZE].reshape(len(x), groups, GROUP_SIZE).amax(-1)
    ordered: Tensor = tops.topk(most, dim=-1).values
    return ordered.gather(1, (counts - 1).clamp_(min=0)[:, None])[:, 0].clamp_(min=MIN_FLOAT32)


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


def _kth(values: Tensor, k: Tensor) -> Tensor:
    """The k-th greatest of each row; -inf where k is 0 or the row has fewer. [B, C], [B] -> [B]."""
    most = min(max(1, int(k.max())), values.shape[1])
    best_values = values.topk(most, dim=-1).values
    found = best_values.gather(1, (k - 1).clamp_(0, most - 1)[:, None])[:, 0]
    return torch.where((k > 0) & (k <= most), found, -torch.inf)


def _cut_by_mass(weights: Tensor, top_p: Tensor, mass: Tensor) -> None:
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


def top_k_columns(x: Tensor, k: int) -> Tensor:
    """Columns of the k greatest of each row, best first, equal ones by column. [B, k] int64."""
    columns, values = above(x, lower_bounds(x, torch.full((len(x),), k, device=x.device)))
    if bool((values > -torch.inf).sum(-1).min() < k):  # masked tokens fill the list
        return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return columns.gather(1, values.sort(dim=-1, descending=True, stable=True).indices[:, :k])


def count_greater(x: Tensor, value: Tensor) -> Tensor:
    """How many of each row are strictly greater. x: [B, V], value: [B, 1] -> [B] int64."""
    return (x > value).sum(-1)


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each row's greatest value (the lowest of equals), and that value: NaN if any is.

    x: [B, V], any float dtype. Returns [B] int64, [B] float32.
    """
    ids = x.argmax(-1)
    top = x.gather(1, ids[:, None])[:, 0].float()
    return ids, torch.where(x.isnan().any(-1), torch.nan, top)
