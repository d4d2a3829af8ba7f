"""Backend over our own paged_attention op: reference, C++ on CPU, Triton on CUDA.

It owns the counters by which the parts of a split context find their last one: zeros between
launches, and of this backend alone, so that two engines on one device never share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attention.base import (
    AttentionLayer,
    AttentionMetadata,
    AttentionStep,
    BackendCapabilities,
    CrossMetadata,
)
from quire.kernels.formats.shared_prefixes import SharedPrefixes
from quire.kernels.kv_write import kv_write
from quire.kernels.paged_attention import paged_attention

CAPS = BackendCapabilities(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    sinks=True,
    alibi=True,
    spans=True,
    encoder=True,
    coded_cache=True,
)

_MAX_COUNTERS = 1 << 16  # sequences times kv heads of one launch; beyond it, new ones are allocated


@dataclass(frozen=True, slots=True)
class PagedAttentionStep:
    """One step over the cache. Holds the batch; each layer reads its tensors again."""

    cache: list[Tensor]
    metadata: AttentionMetadata
    counters: Tensor | None
    scales: Sequence[Tensor] = ()

    def run(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> Tensor:
        """Write k, v [T, K, D] to the layer's place, then attend q [T, H, D]."""
        metadata, cache = self.metadata, self.cache[layer.place]
        if k is not None and v is not None:
            self._write(k, v, metadata.slots[layer.group], layer)
        return paged_attention(
            q,
            cache,
            metadata.tables[layer.group],
            metadata.q_starts,
            metadata.contexts,
            layer.scale,
            layer.window,
            layer.softcap,
            layer.sinks,
            layer.alibi,
            metadata.rows,
            metadata.decodes,
            metadata.max_context,
            k,
            v,
            layer.k_scale,
            layer.v_scale,
            self.counters,
            layer.position_bias,
            self.scales_of(layer),
            metadata.spans if layer.spans else None,
            metadata.shared,
            metadata.drafts,
            metadata.balanced,
        )

    def with_spans(self, spans: Tensor) -> AttentionStep:
        """The step in which token t also sees positions [spans[t, 0], spans[t, 1])."""
        return replace(self, metadata=replace(self.metadata, spans=spans))

    def with_shared(self, shared: SharedPrefixes) -> AttentionStep:
        """The step with these groups of its sequences, all of one query."""
        return replace(self, metadata=replace(self.metadata, shared=shared))

    def with_balance(self) -> AttentionStep:
        """The step in which the keys of decoding sequences are divided evenly."""
        return replace(self, metadata=replace(self.metadata, balanced=True))

    def run_cross(self, q: Tensor, layer: AttentionLayer) -> Tensor:
        """Attend q [T, H, D] to the sources of its tokens.

        Each token is a sequence of one query, with its source as context.
        """
        cross, cache = self.metadata.cross, self.cache[layer.place]
        assert cross is not None, "the step has no sources"
        return paged_attention(
            q,
            cache,
            cross.table,
            cross.starts,
            cross.lengths,
            layer.scale,
            rows=cross.rows,
            decodes=len(q),
            max_context=cross.table.shape[1] * cache.shape[3],
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            counters=self.counters,
            scales=self.scales_of(layer),
        )

    def with_sources(self, cross: CrossMetadata) -> AttentionStep:
        """The step whose tokens see other sources."""
        return replace(self, metadata=replace(self.metadata, cross=cross))

    @property
    def source_lengths(self) -> Tensor:
        """[T] int32: tokens of its source that each token sees."""
        assert self.metadata.cross is not None, "the step has no sources"
        return self.metadata.cross.lengths

    def write_cross(self, k: Tensor, v: Tensor, slots: Tensor, layer: AttentionLayer) -> None:
        """Write k, v [T, K, D] of sources to their slots [T]."""
        self._write(k, v, slots, layer)

    def _write(self, k: Tensor, v: Tensor, slots: Tensor, layer: AttentionLayer) -> None:
        scales = self.scales[layer.place] if self.scales else None
        own = None if scales is not None else layer.head_scales
        cache = self.cache[layer.place]
        kv_write(k, v, cache, slots, layer.k_scale, layer.v_scale, scales, own)

    def scales_of(self, layer: AttentionLayer) -> Tensor | None:
        """[N, 2, K, B] of the layer's codes; None: it has k_scale and v_scale, or no codes."""
        if self.scales:
            return self.scales[layer.place]
        if layer.head_scales is None:
            return None
        return layer.head_scales[None, :, :, None].expand(self.cache[layer.place].shape[:4])

    @property
    def block_size(self) -> int:
        return self.cache[0].shape[3]


class Backend:
    """Paged attention. Nothing to prepare: the op reads the batch itself."""

    supports_prefill_graphs = True

    def __init__(self, cache: list[Tensor], scales: Sequence[Tensor] = ()) -> None:
        """scales: [N, 2, K, B] float32 per place, of codes with a scale per token and head."""
        self.cache, self.scales = cache, scales
        on_cpu = not cache or cache[0].is_cpu
        self.counters = (
            None
            if on_cpu
            else torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=cache[0].device)
        )

    def plan(self, batch: AttentionMetadata) -> AttentionStep:
        return PagedAttentionStep(self.cache, batch, self.counters, self.scales)
