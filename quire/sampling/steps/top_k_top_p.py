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

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.rows import LOWEST, Scratch, joined, lower_bounds, select

SLACK = 1e-3
"""How far, in logits, a bound stays below what rounding could move."""


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


def sample(logits: Tensor, cuts: Cuts, shares: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of `cuts`. Returns ids [n] int64 and the rows' best logits [n].

    logits: [R, V] any float dtype, not changed. shares: [n] float64 in [0, 1), one draw each.
    """
    ids, tops = [], []
    for block in scratch.blocks(len(cuts.numbers)):
        z, top = _scaled(select(logits, cuts.rows, block), cuts, block, scratch)
        if cuts.plain:
            scratch.lane.exp_(z)
            found = scratch.lane.draw(scratch.take(0, len(z)), shares[block])
            found.clamp_(max=scratch.vocab - 1)  # a spoilt row may find padding
        else:
            columns, weights = keep(z, cuts, block, scratch)
            found = columns.gather(1, scratch.lane.search(weights, shares[block])[:, None])[:, 0]
        ids.append(found)
        tops.append(top)
    return joined(ids), joined(tops)


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
    lane, mass = scratch.lane, None
    if cuts.by_mass is not None:
        weights = scratch.take(1, len(z))
        lane.exp_(weights[:, : scratch.vocab].copy_(z))
        mass = lane.chunk_sums(weights)[:, -1]
    columns, values = lane.above(z, _bounds(z, cuts, block, mass))
    weights = lane.exp_(values.clone())
    if cuts.min_p is not None:
        weights.masked_fill_(weights < cuts.min_p[block, None], 0.0)
        values.masked_fill_(weights == 0, -torch.inf)
    if cuts.top_k is not None:
        weights.masked_fill_(values < lane.kth(values, cuts.top_k[block])[:, None], 0.0)
    if cuts.top_p is not None:
        left = weights.cumsum(-1, dtype=torch.float64)[:, -1]
        if mass is not None and cuts.by_mass is not None:
            left = torch.where(cuts.by_mass[block], mass, left)
        lane.cut_by_mass(weights, cuts.top_p[block], left)
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
