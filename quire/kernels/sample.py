"""Sampling picks a token per row of logits: greedy, or drawn from what min_p, top_k, top_p keep.

The parameters of a row are in its slot's row of the sampling table
(quire.kernels.formats.sampling_table_layout); its token counts are in quire.kernels.penalties.

The draw walks through the kept tokens in id order up to a share of their mass. The share is
Philox(seed, outputs so far) only, so a row's token does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.sampling_table_layout import build_table, unpack_sampling_params
from quire.kernels.framework.op import op
from quire.kernels.penalties import penalize

_LOW_32_BITS = 0xFFFFFFFF


class SampledTokens(NamedTuple):
    """What `sample` found for R rows. A row kept the tokens whose logit is above `least`, and those
    equal to it with an id up to `last` (V: all; only top_p cuts among equal ones).
    """

    ids: Tensor  # [R] int32
    max_logits: Tensor  # [R] float32, the best logit: not finite if the row has a NaN or infinity
    min_kept_logits: Tensor  # [R] float32
    last_kept_ids: Tensor  # [R] int32


CASE_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9, "repetition": 1.4, "frequency": 0.3, "presence": -0.4},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 3000, "top_p": 0.5, "min_p": 0.001, "repetition": 0.9},
]


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    table = build_table([kind | {"seed": 7 + i} for i, kind in enumerate(CASE_PARAMS)]).to(device)
    for v, dtype, seen in [
        (40, torch.float32, False),
        (4501, torch.bfloat16, False),
        (2501, torch.float32, True),
        (2512, torch.bfloat16, True),
        (151_936, torch.bfloat16, False),
        (151_936, torch.bfloat16, True),
    ]:
        r = len(CASE_PARAMS) + 1
        counts = (
            torch.randint(-0x8000, 0x7FFF, (len(CASE_PARAMS), v)) % 5
            - (torch.rand(7, v) < 0.05) * 2
        )
        counts *= torch.rand(7, v) < 0.1
        yield {
            "logits": (3 * torch.randn(r, v, device=device)).to(dtype),
            "slots": torch.tensor([*range(len(CASE_PARAMS)), -1], dtype=torch.int32, device=device),
            "outputs": torch.arange(r, dtype=torch.int32, device=device),
            "table": table,
            "counts": counts.to(torch.int16).to(device) if seen else None,
        }


@op(cases=_cases, gpu="sampling.sample")
def sample(
    logits: Tensor,
    slots: Tensor,
    outputs: Tensor,
    table: Tensor,
    scaled: bool = False,
    counts: Tensor | None = None,
) -> SampledTokens:
    """Choose a token for each row.

    logits: [R, V], any float dtype, rows contiguous, not changed. slots: [R] int32 lines of the
    table; negative: a padding row, whose results mean nothing but are in range. outputs: [R] int32,
    tokens each sequence has put out already. table: [slots, WORDS] int64. scaled: the logits are
    divided by the temperature already. counts: [slots, V] int16; None: there are no penalties.
    """
    at = slots.long().clamp(min=0)
    temperature, top_k, top_p, min_p, seeds = unpack_sampling_params(table[at])
    random = temperature > 0
    x, vocab = logits.float(), logits.shape[1]
    if counts is not None:
        x = penalize(x, table[at], counts[at])
    top, best = x.amax(-1), x.argmax(-1)
    divisor = torch.ones_like(temperature) if scaled else torch.where(random, temperature, 1.0)
    weights = ((x - top[:, None]) / divisor[:, None]).exp()
    weights = torch.where(weights < min_p[:, None], 0.0, weights)
    ordered = x.sort(dim=-1, descending=True).values
    places = torch.where(top_k > 0, top_k, vocab).long().clamp(1, vocab) - 1
    weights = torch.where(x < ordered.gather(1, places[:, None]), 0.0, weights).double()
    weights = torch.where(_top_p_mask(weights, x, top_p), weights, 0.0)
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
    return SampledTokens(
        ids.int(),
        top,
        torch.where(cut, least, -torch.inf),
        torch.where(random & (top_p < 1), last, vocab).int(),
    )


def _top_p_mask(weights: Tensor, x: Tensor, top_p: Tensor) -> Tensor:
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
    k0, k1 = seeds & _LOW_32_BITS, (seeds >> 32) & _LOW_32_BITS
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57  # the low 64 bits are right even if they wrap
        a, b, c, d = (
            ((right >> 32) & _LOW_32_BITS) ^ b ^ k0,
            right & _LOW_32_BITS,
            ((left >> 32) & _LOW_32_BITS) ^ d ^ k1,
            left & _LOW_32_BITS,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW_32_BITS, (k1 + 0xBB67AE85) & _LOW_32_BITS
    return ((a >> 5) * (1 << 26) + (b >> 6)).double() * 2.0**-53
