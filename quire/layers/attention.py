"""Attention layer: the facts that a backend reads, and the place of its KV in the cache.

It has no parameters. models/build.py sets `group` and `place` from the KV layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from quire.distributed.mesh import Mesh, head_range, shard_range
from quire.kernels.disentangled_attention import disentangled_attention
from quire.kernels.encoder_attention import encoder_attention
from quire.layers.relative_bias import RelativeBias

if TYPE_CHECKING:
    from quire.attention.base import AttentionStep, CrossAttentionStep
    from quire.attention.packed import PackedAttentionStep


class Attention(nn.Module):
    """Attends over the paged cache of one layer."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Sequence[float] | None = None,
        relative: RelativeBias | None = None,
        spans: bool = True,
    ) -> None:
        """alibi: what is subtracted from a score per position of distance, for each head.

        relative: the bias of scores by distance, which layers may share.

        spans: whether tokens of an image may see each other in both directions.
        """
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.total_kv_heads, self.kv_shard = kv_heads, range(kv_heads)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window  # a position sees this many last ones, itself included
        self.softcap, self.spans = softcap, spans
        self.sinks = sinks  # [H] logits that join the softmax and have no value
        self.slopes = alibi
        self.alibi: Tensor | None = None  # [H] of this rank's heads, from `place_constants` on
        self.__dict__["relative"] = relative  # it is a module of the model, not of each layer
        self.k_scale = self.v_scale = 1.0  # of a cache of 8 bits: what is stored is x / scale
        self.head_scales: Tensor | None = (
            None  # [2, K] float32 of keys and values, in place of both
        )
        self.group = 0  # of layers that share block tables
        self.place = 0  # which of the cache's tensors

    def shard(self, mesh: Mesh) -> None:
        """Keep this rank's heads."""
        mine = head_range(self.heads, self.kv_heads, mesh)
        if self.slopes is not None:
            self.slopes = self.slopes[mine.start : mine.stop]
        self.heads = len(mine)
        self.kv_shard = shard_range(self.kv_heads, mesh, what="key-value heads", repeat=True)
        self.kv_heads = len(self.kv_shard)

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the slopes of ALiBi on the device, before the first forward."""
        if self.slopes is not None:
            with torch.device("cpu"):
                self.alibi = torch.tensor(self.slopes).to(device)

    @property
    def position_bias(self) -> Tensor | None:
        """[H, 2 R + 1] float32, added to a score by the key's distance."""
        relative: RelativeBias | None = self.__dict__["relative"]
        return None if relative is None else relative.table

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: AttentionStep) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H * D]."""
        return step.run(q, k, v, self).view(q.shape[0], -1)


class SharedAttention(nn.Module):
    """Attends over the cache of an earlier layer, its source, and writes nothing."""

    def __init__(
        self, source: Attention, *, scale: float | None = None, softcap: float | None = None
    ) -> None:
        super().__init__()
        self._source = (source,)  # not a module of this one: it has a layer of its own
        self.scale = source.scale if scale is None else scale
        self.window, self.softcap = source.window, softcap
        self.sinks: Tensor | None = None

    alibi = property(lambda self: self._source[0].alibi)
    position_bias = property(lambda self: self._source[0].position_bias)
    k_scale = property(lambda self: self._source[0].k_scale)
    v_scale = property(lambda self: self._source[0].v_scale)
    head_scales = property(lambda self: self._source[0].head_scales)
    spans = property(lambda self: self._source[0].spans)
    group = property(lambda self: self._source[0].group)
    place = property(lambda self: self._source[0].place)

    def forward(self, q: Tensor, step: AttentionStep) -> Tensor:
        """q [T, H, D] -> [T, H * D]."""
        return step.run(q, None, None, self).view(q.shape[0], -1)


class CrossAttention(Attention):
    """Attends over the cached keys and values of the encoder's output."""

    def forward(self, q: Tensor, step: AttentionStep) -> Tensor:  # type: ignore[override]
        """q [T, H, D] -> [T, H * D]."""
        return cast("CrossAttentionStep", step).run_cross(q, self).view(q.shape[0], -1)

    def write(self, k: Tensor, v: Tensor, slots: Tensor, step: AttentionStep) -> None:
        """Cache k, v [S, K, D] of source tokens in their slots [S]."""
        cast("CrossAttentionStep", step).write_cross(k, v, slots, self)


class DisentangledAttention(Attention):
    """Attends within whole sequences, without a cache, by content and by distance. (DeBERTa)"""

    def __init__(
        self, heads: int, head_dim: int, *, scale: float, buckets: Callable[[int], int], reach: int
    ) -> None:
        """buckets: distance from key to query -> number of its vectors. reach: distances served."""
        super().__init__(heads, heads, head_dim, scale=scale)
        self._bucket, self._reach = buckets, reach
        self._buckets = torch.empty(0)  # until `place_constants`

    def place_constants(self, dtype: torch.dtype, device: torch.device) -> None:
        """Put the table of distances on the device, before the first forward."""
        with torch.device("cpu"):
            distances = range(-self._reach, self._reach + 1)
            self._buckets = torch.tensor([self._bucket(d) for d in distances], dtype=torch.int32)
        self._buckets = self._buckets.to(device)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_keys: Tensor | None,
        position_queries: Tensor | None,
        step: AttentionStep,
    ) -> Tensor:
        """q, k, v [T, H, D] and vectors of distances [P, H, D] -> [T, H * D]."""
        batch = cast("PackedAttentionStep", step).metadata
        out = disentangled_attention(
            q,
            k,
            v,
            position_keys,
            position_queries,
            self._buckets,
            batch.q_starts,
            batch.max_query,
            self.scale,
        )
        return out.view(q.shape[0], -1)


class EncoderAttention(nn.Module):
    """Attends over whole sources, without a cache."""

    def __init__(
        self, head_dim: int, *, scale: float | None = None, relative: RelativeBias | None = None
    ) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale
        self.__dict__["relative"] = relative

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        longest: int,
        key_counts: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, K, D] of packed sources -> [T, H * D].

        starts: [S + 1] int32, of each source; longest: tokens of the longest. key_counts: [S]
        int32, how many tokens of a source are attended to, its first; None: all.
        """
        relative: RelativeBias | None = self.__dict__["relative"]
        bias = None if relative is None else relative.table
        made = encoder_attention(q, k, v, starts, longest, self.scale, bias, key_counts=key_counts)
        return made.view(len(q), -1)
