"""Disentangled attention: scores have terms of content and position. (DeBERTa)

    source s owns rows [starts[s], starts[s + 1]) of q, k and v; tokens see all of their source
    score of i, j = scale * (q[i] . k[j] + q[i] . position_keys[b] + k[j] . position_queries[b])
    b = buckets[reach + i - j], the vector of a distance

Axes: T tokens of all sources, S sources, H heads, D head size, P vectors of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for lengths, heads, size, count, dtype, terms in [
        ([1, 7, 40], 2, 16, 12, fp32, (True, True)),
        ([33, 2, 20], 3, 32, 30, bf16, (True, True)),
        ([5, 90], 2, 16, 8, fp32, (True, False)),
        ([70], 2, 24, 64, fp32, (False, True)),
        ([300, 9, 130], 4, 64, 64, bf16, (True, True)),
    ]:
        qkv = torch.randn(sum(lengths), 3 * heads, size, device=device).to(dtype)
        positions = [torch.randn(count, heads, size, device=device).to(dtype) for _ in terms]
        reach = max(lengths) + 3
        distances = torch.arange(-reach, reach + 1, device=device)
        buckets = (distances // 3 + count // 2).clamp(0, count - 1).int()
        q, k, v = qkv.split(heads, dim=1)
        case = {"q": q, "k": k, "v": v, "buckets": buckets, "longest": max(lengths)}
        case["position_keys"], case["position_queries"] = (
            one if used else None for one, used in zip(positions, terms)
        )
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        yield case | {"starts": starts, "scale": (size * (1 + sum(terms))) ** -0.5}


@op(cases=_cases, gpu="attention.disentangled_attention")
def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    buckets: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Attend every token to the tokens of its source.

    q, k, v: [T, H, D], may be strided. position_keys, position_queries: [P, H, D], of q's dtype;
    None: the scores have no such term. buckets: [2 R + 1] int32, R >= longest - 1. starts: [S + 1]
    int32. longest: tokens of the longest source. Returns a new [T, H, D] in q.dtype; rows of no
    source hold anything.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    reach = len(buckets) // 2
    bounds = starts.tolist()
    for low, high in pairwise(bounds):
        n = high - low
        at = buckets[reach - n + 1 : reach + n].long()  # of distances 1 - n to n - 1
        queries, keys, values = (x[low:high].transpose(0, 1).float() for x in (q, k, v))
        scores = queries @ keys.mT  # [H, n, n]
        if position_keys is not None:
            by_place = queries @ position_keys[at.flip(0)].permute(1, 2, 0).float()
            scores += _along_diagonals(by_place)
        if position_queries is not None:
            by_place = keys @ position_queries[at].permute(1, 2, 0).float()
            scores += _along_diagonals(by_place).mT
        weights = (scores * scale).softmax(-1)
        out[low:high] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out


def _along_diagonals(x: Tensor) -> Tensor:
    """x [H, n, 2 n - 1] contiguous -> a view [H, n, n]: i, j is column j - i + n - 1 of row i."""
    heads, n, width = x.shape
    return x.as_strided((heads, n, n), (n * width, width - 1, 1), x.storage_offset() + n - 1)
