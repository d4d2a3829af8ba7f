"""MLA attention: causal attention over a paged cache of latents, the source of keys and values.

    a token's latent has L + R numbers: a compressed part and a rotated part, shared by all heads
    key of head h = (up[h, :P] @ compressed | rotated)      value of head h = up[h, P:] @ compressed
    sequence s owns query rows [q_starts[s], q_starts[s+1]): the LAST of its contexts[s] tokens

Both can be done without keys and values: q . (up @ c) = (q @ up) . c, and the sum of weighted
values is up @ the sum of weighted latents. That reads L + R numbers a token whatever H is, for more
arithmetic per pair: right for a row that decodes. Where a step brings many queries at once, keys
and values of all tokens are computed instead, and each pair costs P + R + V instead of 2 L + R.

Axes: T query tokens, S sequences, H query heads, P size of a query without its rotated part,
R rotated size, L compressed size, V size of a value, N blocks, B block size, W table width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op

_TILE = 64  # query rows of one sequence the reference scores at a time


def _case(
    device: torch.device,
    shape: tuple[int, int, int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    shuffled: bool = False,
) -> dict[str, Any]:
    """rows: (queries, context) of each sequence, those of one query first; 0 tokens: padding."""
    heads, plain, rotated, latent, value, block = shape
    queries = [q for q, _ in rows]
    decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    width = max(-(-c // block) for _, c in rows) + 1
    pool = sum(-(-c // block) for _, c in rows) + 3
    free = torch.randperm(pool).int()
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    cache = torch.full((pool, 1, 1, block, latent + rotated), float("nan"))
    own, at = [], 0  # slots without a token may hold any number
    for s, (q, c) in enumerate(rows):
        used = -(-c // block)
        tables[s, :used] = free[at : at + used]
        held = torch.randn(c, latent + rotated)
        spots = torch.arange(c)
        cache[tables[s][spots // block].long(), 0, 0, spots % block] = held
        own.append(held[c - q :] if c else torch.zeros(q, latent + rotated))
        at += used
    places = torch.randperm(len(rows)).int() if shuffled else None
    if places is not None:
        tables[places.long()] = tables.clone()
    up = torch.randn(heads, plain + value, latent) / latent**0.5
    both = torch.randn(sum(queries), heads, plain + rotated).to(device, dtype)
    return {
        "q": both[..., :plain],
        "q_rope": both[..., plain:].contiguous(),
        "latents": torch.cat(own).to(device, dtype),
        "up": up.to(device, dtype),
        "cache": cache.to(device, dtype),
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": (plain + rotated) ** -0.5,
        "rows": None if places is None else places.to(device),
        "decodes": decodes,
        "past": max((c - q for q, c in rows[decodes:]), default=0),
    }


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    mixed = [(1, 33), (1, 1), (1, 0), (7, 7), (5, 70), (2, 19)]
    fresh = [(1, 40), (1, 0), (33, 33), (3, 3), (18, 18)]
    yield _case(device, (4, 24, 16, 32, 20, 16), mixed, fp32)
    yield _case(device, (4, 24, 16, 32, 20, 16), fresh, fp32, shuffled=True)
    yield _case(device, (16, 32, 16, 64, 32, 16), mixed, bf16, shuffled=True)
    yield _case(device, (2, 32, 16, 64, 16, 16), fresh, bf16)
    yield _case(device, (3, 20, 6, 20, 12, 4), mixed, fp32)
    yield _case(device, (5, 16, 32, 32, 16, 32), [(1, 100), (1, 1)], bf16)
    yield _case(device, (2, 16, 16, 32, 16, 16), [(1, 0), (1, 0)], bf16)
    yield _case(device, (6, 16, 16, 32, 16, 16), [(40, 40), (3, 90)], torch.float16, shuffled=True)
    yield _case(device, (2, 16, 16, 32, 16, 16), [(1, 9), (170, 300), (10, 10), (90, 250)], fp32)
    yield _case(device, (2, 24, 16, 32, 12, 16), [(100, 450)], bf16, shuffled=True)
    yield {**_case(device, (2, 16, 16, 32, 16, 16), [(100, 130), (2, 2)], fp32), "past": None}


@op(cases=_cases, gpu="mla.mla_attention")
def mla_attention(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    up: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    rows: Tensor | None = None,
    decodes: int = 0,
    past: int | None = None,
) -> Tensor:
    """Attend every query row to the tokens of its sequence.

    q: [T, H, P], q_rope: [T, H, R], may be strided. latents: [T, L + R], the step's own, which are
    in the cache too. up: [H, P + V, L]. cache: [N, 1, 1, B, L + R]. rows: [S] int32, sequence s
    has the table tables[rows[s]]; None: tables[s]. decodes: so many first sequences have one query
    each. past: the most tokens any other has before this step's; None: not known. Returns a new
    [T, H * V] in q.dtype; rows of a sequence of no tokens (padding) are zeros.
    """
    heads, value = q.shape[1], up.shape[1] - q.shape[2]
    out = torch.zeros(len(q), heads * value, dtype=q.dtype, device=q.device)
    starts, lengths = q_starts.tolist(), contexts.tolist()
    places = range(len(lengths)) if rows is None else rows.tolist()
    for s, context in enumerate(lengths):
        if context == 0:
            continue
        used = tables[places[s], : -(-context // cache.shape[3])].long()
        held = cache[used].flatten(0, 3)[:context].float()  # [n, L + R]
        attend = _attend_mqa if starts[s + 1] - starts[s] == 1 else _attend_mha
        for row in range(starts[s], starts[s + 1], _TILE):
            stop = min(row + _TILE, starts[s + 1])
            end = context - (starts[s + 1] - stop)  # tokens visible to the last of these rows
            queries = q[row:stop].float(), q_rope[row:stop].float()
            mixed = attend(*queries, up.float(), held[:end], scale)
            out[row:stop] = mixed.flatten(1).to(q.dtype)
    return out


def _attend_mqa(q: Tensor, q_rope: Tensor, up: Tensor, held: Tensor, scale: float) -> Tensor:
    """q [r, H, P], q_rope [r, H, R], the last r positions of held [n, L + R] -> [r, H, V]."""
    plain, latent = q.shape[2], up.shape[2]
    both = torch.cat((torch.einsum("rhp,hpl->rhl", q, up[:, :plain]), q_rope), -1)
    weights = _causal_softmax(torch.einsum("rhd,nd->hrn", both, held) * scale)
    mixed = torch.einsum("hrn,nl->rhl", weights, held[:, :latent])
    return torch.einsum("rhl,hvl->rhv", mixed, up[:, plain:])


def _attend_mha(q: Tensor, q_rope: Tensor, up: Tensor, held: Tensor, scale: float) -> Tensor:
    """The same, by its definition."""
    plain, latent = q.shape[2], up.shape[2]
    keys, values = torch.einsum("nl,hcl->hnc", held[:, :latent], up).split(
        [plain, up.shape[1] - plain], -1
    )
    scores = torch.einsum("rhp,hnp->hrn", q, keys)
    scores += torch.einsum("rhd,nd->hrn", q_rope, held[:, latent:])
    return torch.einsum("hrn,hnv->rhv", _causal_softmax(scores * scale), values)


def _causal_softmax(scores: Tensor) -> Tensor:
    """Softmax of [H, r, n], the rows being the last r of n positions."""
    rows, span = scores.shape[1:]
    at = torch.arange(span, device=scores.device)
    hidden = at[None] > at[span - rows :, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)
