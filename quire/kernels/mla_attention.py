"""Causal attention over a paged cache of latents: all query heads share one key per token.

    a token's latent has L + R numbers: a compressed part that is key and value at once, and a
    rotated part that is key only
    score = (q . compressed + q_rope . rotated) * scale       output = sum of weights * compressed
    sequence s owns query rows [q_starts[s], q_starts[s+1]): the LAST of its contexts[s] tokens

Queries come in the latent space (mla_queries), outputs leave it later (mla_values): what a head
would have made of the latents is folded into both, so a step reads L + R numbers per token.

Axes: T query tokens, S sequences, H query heads, L compressed size, R rotated size, N blocks,
B block size, W width of the block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.op import op

_TILE = 64  # query rows of one sequence the reference scores at a time


def _case(
    device: torch.device,
    shape: tuple[int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    shuffled: bool = False,
) -> dict[str, Any]:
    """rows: (queries, context) of each sequence, those of one query first; 0 tokens: padding."""
    heads, latent, rotated, block = shape
    queries = [q for q, _ in rows]
    width = max(-(-c // block) for _, c in rows) + 1
    pool = sum(-(-c // block) for _, c in rows) + 3
    free = torch.randperm(pool).int()
    tables = torch.full((len(rows), width), -1, dtype=torch.int32)
    at = 0
    for s, (_, c) in enumerate(rows):
        used = -(-c // block)
        tables[s, :used] = free[at : at + used]
        at += used
    cache = torch.randn(pool, 1, 1, block, latent + rotated, device=device).to(dtype)
    for s, (_, c) in enumerate(rows):  # what no token has written yet may hold anything
        if c % block:
            cache[tables[s, c // block], :, :, c % block :] = float("nan")
    places = torch.randperm(len(rows)).int() if shuffled else None
    if places is not None:
        tables[places.long()] = tables.clone()
    return {
        "q": torch.randn(sum(queries), heads, latent, device=device).to(dtype),
        "q_rope": torch.randn(sum(queries), heads, rotated, device=device).to(dtype),
        "cache": cache,
        "tables": tables.to(device),
        "q_starts": torch.tensor([0, *queries]).cumsum(0).int().to(device),
        "contexts": torch.tensor([c for _, c in rows], dtype=torch.int32, device=device),
        "scale": (latent + rotated) ** -0.5,
        "rows": None if places is None else places.to(device),
        "decodes": next((i for i, q in enumerate(queries) if q != 1), len(queries)),
    }


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    mixed = [(1, 33), (1, 1), (1, 0), (7, 7), (5, 70), (2, 19)]
    yield _case(device, (4, 32, 16, 16), mixed, fp32)
    yield _case(device, (16, 64, 16, 16), mixed, bf16, shuffled=True)
    yield _case(device, (3, 20, 6, 4), mixed, fp32)
    yield _case(device, (5, 32, 32, 32), [(1, 100), (1, 1)], bf16)
    yield _case(device, (2, 32, 16, 16), [(1, 0), (1, 0)], bf16)
    yield _case(device, (6, 32, 16, 16), [(40, 40), (3, 90)], torch.float16, shuffled=True)


@op(cases=_cases, gpu=True)
def mla_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    q_starts: Tensor,
    contexts: Tensor,
    scale: float,
    rows: Tensor | None = None,
    decodes: int = 0,
) -> Tensor:
    """Attend every query row to the cached latents of its sequence.

    q: [T, H, L], q_rope: [T, H, R], both may be strided. cache: [N, 1, 1, B, L + R], the step's
    latents written. rows: [S] int32, sequence s has the table tables[rows[s]]; None: tables[s].
    decodes: so many first sequences have one query each. Returns a new [T, H, L] in q.dtype;
    rows of a sequence of no tokens (padding) are zeros.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = q_starts.tolist(), contexts.tolist()
    places = range(len(lengths)) if rows is None else rows.tolist()
    block = cache.shape[3]
    for s, context in enumerate(lengths):
        if context == 0:
            continue
        used = tables[places[s], : -(-context // block)].long()
        latents = cache[used].flatten(0, 3)[:context].float()  # [n, L + R]
        for row in range(starts[s], starts[s + 1], _TILE):
            stop = min(row + _TILE, starts[s + 1])
            end = context - (starts[s + 1] - stop)  # tokens the last of these rows sees
            both = torch.cat((q[row:stop], q_rope[row:stop]), -1).float()
            out[row:stop] = _attend(both, latents[:end], q.shape[2], scale).to(q.dtype)
    return out


def _attend(q: Tensor, latents: Tensor, size: int, scale: float) -> Tensor:
    """q [r, H, L + R], the last r of the n positions of latents [n, L + R] -> [r, H, L]."""
    at = torch.arange(len(latents), device=q.device)
    hidden = at[None] > at[-len(q) :, None]  # [r, n]
    scores = torch.einsum("rhd,nd->hrn", q, latents) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hrn,nl->rhl", weights, latents[:, :size])
