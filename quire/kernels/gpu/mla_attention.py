"""Latent attention on the GPU: which kernels a step takes, and the products around them.

    rows that decode        queries to latent space, mla_decode, values from it
    prompts, all fresh      keys and values of the step's tokens, mla_prompt
    chunks                  the same, and for what is in the cache already, slice by slice of the
                            heads: queries to latent space, mla_cached, values from it, join
    a few rows more         as rows that decode, in mla_cached

Slices keep what chunks need below what a fresh step of as many tokens holds for its keys and
values: the memory that was measured for the largest step is enough for any.

Axes: as in quire.kernels.mla_attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.cache import rehearsing
from quire.kernels.gpu.mla_cached import cached
from quire.kernels.gpu.mla_decode import decode
from quire.kernels.gpu.mla_prompt import join, prompt

FEW = 128
"""Tokens for which making keys and values does not pay."""

SLICES = 8
WHOLE = 256
"""Tokens for which slices save nothing that counts."""


def outputs(
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
    fresh: bool = False,
) -> Tensor:
    """[T, H * V]. The latent's sizes must be powers of two, all of one dtype."""
    latent, rotated = up.shape[2], q_rope.shape[2]
    for size in (latent, rotated):
        if size < 16 or size & (size - 1):
            return NotImplemented
    if latent > 512 or not cache.is_contiguous() or not up.is_contiguous():
        return NotImplemented
    if any(t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, q_rope, latents, up, cache)):
        return NotImplemented
    wide = q.shape[1] * (up.shape[1] - q.shape[2])
    return torch.empty((q.shape[0], wide), dtype=q.dtype, device=q.device)


def launch(
    out: Tensor,
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
    fresh: bool = False,
) -> None:
    log_scale = scale * math.log2(math.e)
    keys, values = up[:, : q.shape[2]], up[:, q.shape[2] :]
    if decodes:
        mixed = to_latent(q[:decodes], keys)
        decode(mixed, mixed, q_rope, cache, tables, contexts, log_scale, rows, decodes)
        from_latent(out[:decodes], mixed, values)
    if decodes == contexts.shape[0]:
        return
    out, q, q_rope, latents = (t[decodes:] for t in (out, q, q_rope, latents))
    where = (cache, tables, q_starts, contexts, log_scale, rows, decodes)
    every = rehearsing()  # a start shows fresh steps only, and a chunk must not wait for a compiler
    if every or (not fresh and len(q) <= FEW):
        mixed = to_latent(q, keys)
        cached(mixed, None, mixed, q_rope, *where)
        from_latent(out, mixed, values)
        if not every:
            return
    if every or fresh:
        _own(out, None, q, q_rope, latents, up, q_starts, log_scale, decodes)
    if every or not fresh:
        own = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        _own(out, own, q, q_rope, latents, up, q_starts, log_scale, decodes)
        for slices in (1, SLICES) if every else (1 if len(q) <= WHOLE else SLICES,):
            _past(out, own, q, q_rope, keys, values, where, slices)


def _own(
    out: Tensor,
    weight: Tensor | None,
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    up: Tensor,
    q_starts: Tensor,
    log_scale: float,
    first: int,
) -> None:
    """The step's own tokens, by their keys and values."""
    heads, each, latent = up.shape
    kv = torch.mm(latents[:, :latent], up.view(-1, latent).t()).view(-1, heads, each)
    prompt(out, weight, q, q_rope, kv, latents[:, latent:], q_starts, log_scale, first)


def _past(
    out: Tensor,
    own: Tensor,
    q: Tensor,
    q_rope: Tensor,
    keys: Tensor,
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor, float, Tensor | None, int],
    slices: int,
) -> None:
    """What was in the cache before the step, added to `out` slice by slice of the heads."""
    heads = q.shape[1]
    each = -(-heads // min(slices, heads))
    for h in range(0, heads, each):
        some = slice(h, min(h + each, heads))
        mixed = to_latent(q[:, some], keys[some])
        weight = torch.empty(mixed.shape[:2], dtype=torch.float32, device=q.device)
        cached(mixed, weight, mixed, q_rope[:, some], *where)
        past = torch.empty((*mixed.shape[:2], values.shape[1]), dtype=q.dtype, device=q.device)
        from_latent(past.flatten(1), mixed, values[some])
        join(out, own, past, weight, h)


def to_latent(q: Tensor, keys: Tensor) -> Tensor:
    """q [T, H, P] by keys [H, P, L] -> [T, H, L]: what queries are to compressed latents."""
    out = torch.empty((*q.shape[:2], keys.shape[2]), dtype=q.dtype, device=q.device)
    torch.bmm(q.transpose(0, 1), keys, out=out.transpose(0, 1))
    return out


def from_latent(out: Tensor, mixed: Tensor, values: Tensor) -> None:
    """mixed [T, H, L] by values [H, V, L] -> out [T, H * V]."""
    tokens, heads, _ = mixed.shape
    to = out.view(tokens, heads, -1).transpose(0, 1)
    torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2), out=to)
