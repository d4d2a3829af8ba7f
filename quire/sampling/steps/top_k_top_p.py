"""min_p, top_k and top_p: which tokens stay, and the draw among them.

In this order, each on what the one before left:
    min_p   probability >= min_p x the best one's
    top_k   logit >= the k-th greatest: all tokens tied with the k-th stay
    top_p   the likeliest tokens, in order, until their share reaches top_p; of equal ones the
            lowest ids first; the best always stays

The vocabulary is not sorted. A bound that no kept token is below leaves a short list of candidates
(above), and all that is exact is done on that. The draw goes through the candidates in id order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.rows import (
    LOWEST,
    Scratch,
    above,
    chunk_sums,
    draw,
    exp_,
    lower_bounds,
    search,
    select,
)

SLACK = 1e-3
"""How far, in logits, a bound stays below what rounding could move."""

SHORT = 4096
"""Lists longer than this are cut by a histogram before anything is sorted."""


@dataclass(slots=True)
class Cuts:
    """The random rows of a batch that share one way of drawing. Tensors are [n], on the device."""

    rows: Tensor | None  # which rows of the logits; None: all, in order
    numbers: list[int]  # the same, on the host
    temperature: Tensor
    divides: bool  # some temperature is not 1
    min_p: Tensor | None = None  # None in all three: no row cuts by it
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    by_mass: Tensor | None = None  # bool: top_p alone cuts, so its bound needs the whole mass

    @property
    def plain(self) -> bool:
        return self.min_p is None and self.top_k is None and self.top_p is None


def make_cuts(
    numbers: list[int],
    total: int,
    params: list[tuple[float, float, int, float]],
    device: torch.device,
) -> Cuts:
    """Gather (temperature, min_p, top_k, top_p) of the given rows. top_k 0: off."""

    def tensor(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    temperature, min_p, top_k, top_p = (list(x) for x in zip(*params))
    alone = [p < 1 and m == 0 and k == 0 for _, m, k, p in params]
    return Cuts(
        rows=None if len(numbers) == total else tensor(numbers),
        numbers=numbers,
        temperature=tensor(temperature),
        divides=any(t != 1.0 for t in temperature),
        min_p=tensor(min_p) if any(min_p) else None,
        top_k=tensor(top_k) if any(top_k) else None,
        top_p=tensor(top_p).double() if any(p < 1 for p in top_p) else None,
        by_mass=torch.tensor(alone, device=device) if any(alone) else None,
    )


def sample(
    logits: Tensor, cuts: Cuts, shares: Tensor, scratch: Scratch, ids: Tensor, tops: Tensor
) -> None:
    """Draw a token for each row of `cuts`, into ids[those rows]; their best logit into tops.

    logits: [R, V] any float dtype, not changed. shares: [n] float64 in [0, 1), one draw each.
    """
    for block in scratch.blocks(len(cuts.numbers)):
        x = select(logits, cuts.rows, block)
        z, top = _scaled(x, cuts, block, scratch)
        if cuts.plain:
            exp_(z)
            found = draw(scratch.take(0, len(z)), shares[block])
            found.clamp_(max=scratch.vocab - 1)  # a spoilt row may find padding
        else:
            columns, weights = keep(z, cuts, block, scratch)
            at = search(weights.double().cumsum(-1), shares[block])
            found = columns.gather(1, at[:, None])[:, 0]
        where = block if cuts.rows is None else cuts.rows[block]
        ids[where] = found
        tops[where] = top


def processed(logits: Tensor, cuts: Cuts, scratch: Scratch) -> Tensor:
    """The rows' logits divided by the temperature, -inf where min_p, top_k or top_p cut. [n, V]."""
    out = torch.empty((len(cuts.numbers), scratch.vocab), device=logits.device)
    for block in scratch.blocks(len(out)):
        x = select(logits, cuts.rows, block).float() / cuts.temperature[block, None]
        if cuts.plain:
            out[block] = x
            continue
        z, _ = _scaled(select(logits, cuts.rows, block), cuts, block, scratch)
        columns, weights = keep(z, cuts, block, scratch)
        here, at = (weights > 0).nonzero(as_tuple=True)
        at = columns[here, at]
        part = torch.full_like(x, -torch.inf)
        part[here, at] = x[here, at]
        out[block] = part
    return out


def _scaled(x: Tensor, cuts: Cuts, block: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """(x - best) / temperature in scratch 0 [B, V], and best [B]."""
    top = x.amax(-1, keepdim=True).float()
    z = scratch.take(0, len(x))[:, : scratch.vocab]
    torch.sub(x, top, out=z)
    if cuts.divides:
        z.div_(cuts.temperature[block, None])
    return z, top[:, 0]


def keep(z: Tensor, cuts: Cuts, block: slice, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p leave of each row of z ([B, V], best 0).

    Returns columns [B, C] in id order and weights [B, C] float32, 0 where cut off or padding.
    """
    mass = None
    if cuts.by_mass is not None:
        weights = scratch.take(1, len(z))
        exp_(weights[:, : scratch.vocab].copy_(z))
        mass = chunk_sums(weights)[:, -1]
    columns, values, _ = above(z, _bounds(z, cuts, block, mass))
    weights = exp_(values.clone())
    if cuts.min_p is not None:
        weights.masked_fill_(weights < cuts.min_p[block, None], 0.0)
        values.masked_fill_(weights == 0, -torch.inf)
    if cuts.top_k is not None:
        weights.masked_fill_(values < _kth(values, cuts.top_k[block])[:, None], 0.0)
    if cuts.top_p is not None:
        left = weights.double().cumsum(-1)[:, -1]
        if mass is not None and cuts.by_mass is not None:
            left = torch.where(cuts.by_mass[block], mass, left)
        _cut_by_mass(weights, cuts.top_p[block], left)
    return columns, weights


def _bounds(z: Tensor, cuts: Cuts, block: slice, mass: Tensor | None) -> Tensor:
    """A logit per row that every kept token reaches. [B] float32."""
    least = torch.full((len(z),), LOWEST, device=z.device)
    if cuts.min_p is not None:
        least = torch.maximum(least, cuts.min_p[block].log() - SLACK)
    if cuts.top_k is not None:
        k = cuts.top_k[block]
        least = torch.where(k > 0, torch.maximum(least, lower_bounds(z, k)), least)
    if mass is not None and cuts.top_p is not None and cuts.by_mass is not None:
        # All tokens rarer than (1 - p) / V together are less than 1 - p.
        rare = ((1 - cuts.top_p[block]) * mass / z.shape[1]).log().float() - SLACK
        least = torch.where(cuts.by_mass[block], torch.maximum(least, rare), least)
    return least


def _kth(values: Tensor, k: Tensor) -> Tensor:
    """The k-th greatest of each row; -inf where k is 0 or the row has fewer. [B]."""
    most = min(max(1, int(k.max())), values.shape[1])
    best = values.topk(most, dim=-1).values
    found = best.gather(1, (k - 1).clamp_(0, most - 1)[:, None])[:, 0]
    return torch.where((k > 0) & (k <= most), found, -torch.inf)


def _cut_by_mass(weights: Tensor, top_p: Tensor, mass: Tensor) -> None:
    """Zero what lies past top_p x mass, in place. Rows with top_p 1 stay as they are."""
    limit = torch.where(top_p < 1, top_p * mass, math.inf)
    long = ((weights > 0).sum(-1) > SHORT) & (top_p < 1)
    if weights.device.type == "cpu" and bool(long.any()):
        for row in long.nonzero()[:, 0].tolist():
            _cut_long(weights[row].numpy(), float(limit[row]))
        limit = torch.where(long, math.inf, limit)
        if bool(long.all()):
            return
    order = _descending(weights)
    sorted_weights = weights.gather(1, order).double()
    before = sorted_weights.cumsum(-1) - sorted_weights
    kept = torch.zeros_like(weights, dtype=torch.bool)
    kept.scatter_(1, order, before < limit[:, None])
    weights.masked_fill_(~kept, 0.0)


def _descending(weights: Tensor) -> Tensor:
    """Places of each row's weights (>= 0), greatest first, equal ones in order. [B, C] int64."""
    rank = (weights.view(torch.int32).long() ^ 0x7FFFFFFF) << 32
    rank |= torch.arange(weights.shape[1], device=weights.device)
    if rank.device.type == "cpu":
        rank = torch.from_numpy(np.sort(rank.numpy(), axis=-1))
    else:
        rank = rank.sort(-1).values
    return rank & 0xFFFFFFFF


def _cut_long(weights: np.ndarray, limit: float) -> None:
    """_cut_by_mass of one long row: find the histogram bin in which the limit lies, sort only that.

    A bin is the upper half of a float's bits, so bins are in order of weight.
    """
    bins = weights.view(np.int32) >> 16
    masses = np.bincount(bins, weights=weights)[::-1]
    running = masses.cumsum()
    crossing = min(int(np.searchsorted(running, limit)), len(masses) - 1)
    bin_at = len(masses) - 1 - crossing
    inside = np.flatnonzero(bins == bin_at)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    before = (running[crossing] - masses[crossing]) + weights[inside].cumsum(dtype=np.float64)
    before -= weights[inside]
    weights[inside[before >= limit]] = 0.0
    weights[bins < bin_at] = 0.0
