"""Backend of models without a cache: every token attends to the tokens of its own sequence, in both
directions. The keys and values are the step's own, so a step has whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionLayer,
    AttentionMetadata,
    AttentionStep,
    BackendCapabilities,
)
from quire.kernels.encoder_attention import encoder_attention

CAPS = BackendCapabilities(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    alibi=True,
    packed=True,
)


@dataclass(frozen=True, slots=True)
class PackedAttentionStep:
    """One step. Holds the batch; each layer reads its tensors again."""

    metadata: AttentionMetadata
    key_counts: Tensor | None = None  # [S] int32: leading tokens that are attended; None: all

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> Tensor:
        """Attend q [T, H, D] to k, v [T, K, D]: of each sequence, and within the layer's window."""
        assert k is not None, "without a cache every layer has keys"
        assert v is not None, "without a cache every layer has values"
        assert layer.sinks is None, "sinks have no kernel without a cache"
        return encoder_attention(
            q,
            k,
            v,
            self.metadata.q_starts,
            self.metadata.max_query,
            layer.scale,
            layer.position_bias,
            layer.window,
            layer.softcap,
            layer.alibi,
            self.key_counts,
        )


class Backend:
    """Bidirectional attention. Nothing to prepare: the op reads the batch itself."""

    supports_prefill_graphs = True

    def __init__(self, cache: list[Tensor]) -> None:
        """cache: empty."""

    def plan(self, batch: AttentionMetadata) -> AttentionStep:
        return PackedAttentionStep(batch)
