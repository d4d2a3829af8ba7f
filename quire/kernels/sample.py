"""A token for each row of logits: greedy, or drawn from what min_p, top_k and top_p leave.

What a row asks lies in its slot's line of a table on the device, so one launch serves any mix of
rows and a captured graph goes on serving whoever holds the slot:

    word 0  temperature, float32 (0: greedy), below; top_k, int32 (0: all), above
    word 1  top_p, float64
    word 2  min_p, float32
    word 3  seed, 64 bits

The draw is a walk through the kept tokens in id order to a share of their mass; the share is
Philox(seed, outputs so far) and nothing else, so a row's token is the same in any company.
Not here: how the table is filled (quire.sampling.table).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.op import op

WORDS = 4
"""int64 words of one slot's line."""

_LOW = 0xFFFFFFFF


class Drawn(NamedTuple):
    """What `sample` found for R rows. A row kept the tokens whose logit is above `least`, and those
    equal to it with an id up to `last` (V: all; only top_p cuts among equal ones).
    """

    ids: Tensor  # [R] int32
    tops: Tensor  # [R] float32, the best logit: not finite if the row is spoilt
    least: Tensor  # [R] float32
    last: Tensor  # [R] int32


def line(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> np.ndarray:
    """One slot's line: [WORDS] int64. temperature 0: greedy."""
    out = np.zeros(WORDS, np.int64)
    out[:1].view(np.float32)[0] = temperature
    out[:1].view(np.int32)[1] = top_k
    out[1:2].view(np.float64)[0] = top_p
    out[2:3].view(np.float32)[0] = min_p
    out[3:4].view(np.uint64)[0] = seed & (2**64 - 1)
    return out


KINDS = [
    (0.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 40, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 1.0, 0.05),
    (1.0, 3000, 0.5, 0.001),
]


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    lines = np.stack([line(*kind, seed=7 + i) for i, kind in enumerate(KINDS)])
    table = torch.from_numpy(lines).to(device)
    for v, dtype in [
        (40, torch.float32),
        (5000, torch.bfloat16),
        (3001, torch.float32),
        (151_936, torch.bfloat16),
    ]:
        r = len(KINDS) + 1
        yield {
            "logits": (3 * torch.randn(r, v, device=device)).to(dtype),
            "slots": torch.tensor([*range(len(KINDS)), -1], dtype=torch.int32, device=device),
            "outputs": torch.arange(r, dtype=torch.int32, device=device),
            "table": table,
        }


@op(cases=_cases, gpu=True)
def sample(
    logits: Tensor, slots: Tensor, outputs: Tensor, table: Tensor, scaled: bool = False
) -> Drawn:
    """Choose a token for each row.

    logits: [R, V], any float dtype, rows contiguous, not changed. slots: [R] int32 lines of the
    table; negative: nobody's row, whose results mean nothing but are in range. outputs: [R] int32,
    tokens each sequence has put out already. table: [slots, WORDS] int64. scaled: the logits are
    divided by the temperature already.
    """
    temperature, top_k, top_p, min_p, seeds = _asked(table[slots.long().clamp(min=0)])
    random = temperature > 0
    x, vocab = logits.float(), logits.shape[1]
    top, best = x.amax(-1), x.argmax(-1)
    divisor = torch.ones_like(temperature) if scaled else torch.where(random, temperature, 1.0)
    weights = ((x - top[:, None]) / divisor[:, None]).exp()
    weights = torch.where(weights < min_p[:, None], 0.0, weights)
    ordered = x.sort(dim=-1, descending=True).values
    places = torch.where(top_k > 0, top_k, vocab).long().clamp(1, vocab) - 1
    weights = torch.where(x < ordered.gather(1, places[:, None]), 0.0, weights).double()
    weights = torch.where(_within(weights, x, top_p), weights, 0.0)
    share = uniforms(seeds, outputs)
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp(max=vocab - 1)
    ids = torch.where(random, drawn, best)
    cut = random & ((min_p > 0) | (top_k > 0) | (top_p < 1))
    kept = weights > 0
    least = torch.where(kept, x, torch.inf).amin(-1)
    columns = torch.arange(vocab, device=x.device)
    last = torch.where(kept & (x == least[:, None]), columns, 0).amax(-1)
    return Drawn(
        ids.int(),
        top,
        torch.where(cut, least, -torch.inf),
        torch.where(random & (top_p < 1), last, vocab).int(),
    )


def _asked(lines: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The words [R, WORDS] taken apart: temperature, top_k, top_p, min_p, seed."""
    halves = lines.contiguous().view(torch.int32)
    floats = lines.contiguous().view(torch.float32)
    top_p = lines.contiguous().view(torch.float64)[:, 1]
    return floats[:, 0], halves[:, 1], top_p, floats[:, 4], lines[:, 3]


def _within(weights: Tensor, x: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens stay when the likeliest are taken until their share of the mass is top_p."""
    order = (
        torch.where(weights > 0, x, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    )
    ordered = weights.gather(1, order)
    before = ordered.cumsum(-1) - ordered
    limit = torch.where(top_p < 1, top_p * ordered.sum(-1), torch.inf)
    inside = torch.zeros_like(weights, dtype=torch.bool)
    return inside.scatter(1, order, before < limit[:, None])


def uniforms(seeds: Tensor, counts: Tensor) -> Tensor:
    """A float64 in [0, 1) of 53 random bits for each (seed, count): Philox 4x32-10.

    seeds: [R] int64. counts: [R] int32 >= 0. The same bits as quire.sampling.philox.
    """
    a, b = counts.long(), torch.zeros_like(seeds)
    c, d = b, b
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # the low 64 bits are right even if they wrap
        a, b, c, d = (
            ((right >> 32) & _LOW) ^ b ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ d ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return ((a >> 5) * (1 << 26) + (b >> 6)).double() * 2.0**-53
