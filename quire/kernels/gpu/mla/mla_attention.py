"""MLA dispatcher on the GPU: picks the kernels of a step, and runs the products around them.

    rows that decode      queries to latent space, mla_decode, values from it
    a few queries each    the same, one by one or in tiles (mla_prefill_mqa)
    prompts and chunks    keys and values are computed for mla_prefill_mha: for what is in the cache
                          before the step, some positions of each sequence at a time, then for the
                          step's own tokens

A fresh step allocates memory that it does not need: as much as any other step of as many tokens. So
the memory that was measured for the largest fresh step suffices for all.

Axes: as in quire.kernels.mla_attention.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.gpu.mla.mla_decode import decode, expand_to_decode_rows
from quire.kernels.gpu.mla.mla_gather import gather_latents
from quire.kernels.gpu.mla.mla_prefill_mha import PartialAttention, ProjectedKV, prefill_mha
from quire.kernels.gpu.mla.mla_prefill_mqa import prefill_mqa

MIN_MHA_TOKENS = 80
"""Queries per sequence from which computing keys and values of its past is faster."""

MAX_FUSED_UP_ROWS = 16
"""Rows up to which merging and the product after it are one kernel."""

MIN_TILED_ROWS = 64 * 128
"""Queries times heads that fill the device in tiles of 64."""

MIN_CHUNK_TOKENS = 2048
"""Maximum of positions whose keys and values are computed at a time."""


def outputs(
    q: Tensor, q_rope: Tensor, latents: Tensor, up: Tensor, cache: Tensor, *_: Any, **__: Any
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
    past: int | None = None,
) -> None:
    log_scale = scale * math.log2(math.e)
    if decodes:
        keys, values = up[:, : q.shape[2]], up[:, q.shape[2] :]
        mixed = absorb_query(q[:decodes], keys)
        finish = (out[:decodes], values) if decodes <= MAX_FUSED_UP_ROWS else None
        where = (cache, tables, contexts, log_scale, rows, decodes)
        if not decode(mixed, mixed, q_rope, *where, finish=finish):
            up_project_output(out[:decodes], mixed, values)
    if decodes < contexts.shape[0]:
        tokens = (out[decodes:], q[decodes:], q_rope[decodes:])
        step = MLAPrefill(
            *tokens, latents[decodes:], up, cache, tables, q_starts, contexts, log_scale
        )
        step.attend(rows, decodes, past)


class MLAPrefill(NamedTuple):
    """The sequences that do not decode: arguments of the op, the first four for their tokens
    only."""

    out: Tensor
    q: Tensor
    q_rope: Tensor
    latents: Tensor
    up: Tensor
    cache: Tensor
    tables: Tensor
    q_starts: Tensor
    contexts: Tensor
    log_scale: float

    def attend(self, rows: Tensor | None, first: int, past: int | None) -> None:
        tokens, sequences = self.q.shape[0], self.contexts.shape[0] - first
        if past is None or (past and tokens < MIN_MHA_TOKENS * sequences):
            self.attend_mqa(rows, first)
            return
        running = self.attend_context(rows, first, past) if past else None
        if not past:
            self.reserve_peak_memory()
        keys = ProjectedKV(self.up_project(self.latents), self.latents[:, self.up.shape[2] :])
        self.attend_mha(running, keys, first)

    def attend_mqa(self, rows: Tensor | None, first: int) -> None:
        """As rows that decode: each query a row where they are few, else in tiles of queries."""
        tokens, heads, plain = self.q.shape
        mixed = absorb_query(self.q, self.up[:, :plain])
        if tokens * heads >= MIN_TILED_ROWS:
            where = (self.cache, self.tables, self.q_starts, self.contexts)
            prefill_mqa(mixed, mixed, self.q_rope, *where, self.log_scale, rows, first)
        else:
            seen, place = expand_to_decode_rows(tokens, self.q_starts, self.contexts, rows, first)
            decoding = (self.cache, self.tables, seen, self.log_scale, place, tokens)
            decode(mixed, mixed, self.q_rope, *decoding)
        up_project_output(self.out, mixed, self.up[:, plain:])

    def attend_context(self, rows: Tensor | None, first: int, past: int) -> PartialAttention:
        """The results of tokens before the step, so many positions of each sequence at a time."""
        tokens, heads, _ = self.q.shape
        sequences, wide = self.contexts.shape[0] - first, self.cache.shape[4]
        window = min(past, max(tokens, MIN_CHUNK_TOKENS) // sequences)
        some = self.q.new_empty((sequences * window, wide))
        wide = self.out.shape[1]
        sums = torch.empty((tokens, wide), dtype=torch.float32, device=self.q.device)
        running = PartialAttention(sums, sums.new_empty((tokens, heads)), False)
        where = (self.cache, self.tables, self.q_starts, self.contexts, rows, first)
        for low in range(0, past, window):
            gather_latents(some, self.q_rope.shape[2], *where, low, window)
            keys = ProjectedKV(self.up_project(some), some[:, self.up.shape[2] :], low, window)
            self.attend_mha(running, keys, first)
            running = running._replace(started=True)
        return running

    def attend_mha(self, running: PartialAttention | None, keys: ProjectedKV, first: int) -> None:
        where = (self.q_starts, self.contexts, self.log_scale, first)
        prefill_mha(self.out, running, self.q, self.q_rope, keys, *where)

    def up_project(self, latents: Tensor) -> Tensor:
        """Keys and values of latents [n, L + R]: [n, H, P + V]."""
        heads, each, latent = self.up.shape
        flat = self.up.view(-1, latent)
        return torch.mm(latents[:, :latent], flat.t()).view(-1, heads, each)

    def reserve_peak_memory(self) -> None:
        """Allocate, for a moment, the memory of a step with a past: see above."""
        tokens, heads = self.q.shape[:2]
        up_project = heads * self.up.shape[1] + self.cache.shape[4]
        sums = (self.out.shape[1] + heads) * (4 // self.q.itemsize)
        latents = tokens * heads * self.up.shape[2]
        self.q.new_empty(max(latents, tokens * sums + max(tokens, MIN_CHUNK_TOKENS) * up_project))


def absorb_query(q: Tensor, keys: Tensor) -> Tensor:
    """q [T, H, P] by keys [H, P, L] -> [T, H, L]: queries in the space of compressed latents."""
    out = torch.empty((*q.shape[:2], keys.shape[2]), dtype=q.dtype, device=q.device)
    torch.bmm(q.transpose(0, 1), keys, out=out.transpose(0, 1))
    return out


def up_project_output(out: Tensor, mixed: Tensor, values: Tensor) -> None:
    """mixed [T, H, L] by values [H, V, L] -> out [T, H * V]."""
    tokens, heads, _ = mixed.shape
    to = out.view(tokens, heads, -1).transpose(0, 1)
    torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2), out=to)
