"""Backend of latent attention: one latent per token in the cache, shared by all query heads.

Which tokens are attended in the latent space and which by keys and values is the op's choice.
`run`, the ordinary interface, has no meaning here: a latent layer calls `cache_and_slots` and
`attend`.

Axes: T tokens in the step, H query heads, P size of a query without its rotated part, R rotated
size, L latent size, V size of a value, N blocks, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionLayer, AttentionMetadata, BackendCapabilities
from quire.kernels.mla_attention import mla_attention

CAPS = BackendCapabilities(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    sliding_window=False,
    softcap=False,
    latent=True,
)


@dataclass(frozen=True, slots=True)
class MLAStep:
    """One step over the cache. Holds the batch; each layer reads its tensors again."""

    cache: list[Tensor]
    metadata: AttentionMetadata

    def cache_and_slots(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Where a layer's latents go: its cache [N, 1, 1, B, L + R] and the tokens' slots [T]."""
        return self.cache[layer.place], self.metadata.slots[layer.group]

    def attend(
        self, q: Tensor, q_rope: Tensor, latents: Tensor, up: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """q [T, H, P], q_rope [T, H, R], latents [T, L + R], up [H, P + V, L] -> [T, H * V].

        The latents are in the cache already. up: what makes keys and values of a latent.
        """
        metadata = self.metadata
        return mla_attention(
            q,
            q_rope,
            latents,
            up,
            self.cache[layer.place],
            metadata.tables[layer.group],
            metadata.q_starts,
            metadata.contexts,
            layer.scale,
            metadata.rows,
            metadata.decodes,
            metadata.past,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        raise AssertionError("a layer with keys and values was given a latent cache")


class Backend:
    """Latent attention. Nothing to prepare: the ops read the batch themselves."""

    supports_prefill_graphs = False

    def __init__(self, cache: list[Tensor]) -> None:
        """cache: one [N, 1, 1, B, L + R] per layer place."""
        self.cache = cache

    def plan(self, batch: AttentionMetadata) -> MLAStep:
        return MLAStep(self.cache, batch)
