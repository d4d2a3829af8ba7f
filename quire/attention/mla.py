"""The backend of latent attention: one latent per token in the cache, shared by all query heads.

Which tokens are attended in the latent space and which by keys and values is the op's choice.
`run`, the ordinary interface, has no meaning here: a latent layer calls `room` and `attend`.

Axes: T tokens in the step, H query heads, P size of a query without its rotated part, R rotated
size, L latent size, V size of a value, N blocks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionLayer, Batch, Caps
from quire.kernels.mla_attention import mla_attention

CAPS = Caps(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    windows=False,
    softcap=False,
    latent=True,
)


@dataclass(frozen=True, slots=True)
class LatentStep:
    """One step over the cache. Holds the batch; every tensor of it is read anew by each layer."""

    cache: list[Tensor]
    batch: Batch

    def room(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Where a layer's latents go: its cache [N, 1, 1, B, L + R] and the tokens' slots [T]."""
        return self.cache[layer.place], self.batch.slots[layer.group]

    def attend(
        self, q: Tensor, q_rope: Tensor, latents: Tensor, up: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """q [T, H, P], q_rope [T, H, R], latents [T, L + R], up [H, P + V, L] -> [T, H * V].

        The latents are in the cache already. up: what makes keys and values of a latent.
        """
        batch = self.batch
        return mla_attention(
            q,
            q_rope,
            latents,
            up,
            self.cache[layer.place],
            batch.tables[layer.group],
            batch.q_starts,
            batch.contexts,
            layer.scale,
            batch.rows,
            batch.decodes,
            batch.past,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        raise AssertionError("a layer with keys and values was given a latent cache")


class Backend:
    """Latent attention. Nothing to prepare: the ops read the batch themselves."""

    captures_prompts = False

    def __init__(self, cache: list[Tensor]) -> None:
        """cache: one [N, 1, 1, B, L + R] per layer place."""
        self.cache = cache

    def plan(self, batch: Batch) -> LatentStep:
        return LatentStep(self.cache, batch)
