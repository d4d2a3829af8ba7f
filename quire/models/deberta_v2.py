"""DeBERTa v2 and v3: BERT whose scores have terms of distance, by vectors that all layers share.

A distance has a vector of its own up to half the number of buckets; larger ones share vectors, in
ranges that grow as powers. The vectors become keys and queries once, by the matrices of each layer.

Source: model_type "deberta-v2", https://huggingface.co/microsoft/deberta-v3-base; transformers
modeling_deberta_v2.py
Axes:   T tokens in the step, P vectors of distances, E hidden, H heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    DisentangledAttention,
    LayerNorm,
    PositionEmbedding,
    QKVLinear,
    QueryLinear,
    RowLinear,
    TypeEmbedding,
)
from quire.models._encoder import (
    ClassificationHead,
    Encoder,
    EncoderConfig,
    EncoderLayer,
    encoder_sizes,
)
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of
from quire.models.bert import LAYERS

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "relative",
    "tied": True,
    "bidirectional": True,
}
TERMS = ("c2p", "p2c")
"""Parts of scores: query times distance, and distance times key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(EncoderConfig):
    buckets: int  # 0: each distance has a vector
    max_distance: int
    terms: tuple[str, ...]
    shared: bool  # matrices of content make the keys and queries of distances
    normed: bool  # the vectors of distances are
    head_act: str

    @property
    def span(self) -> int:
        """Vectors of distances in each direction."""
        return self.buckets or self.max_distance

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "relative_attention", bool, default=False, one_of={True})
        field_of(hf, "conv_kernel_size", int, default=0, one_of={0})
        sizes = encoder_sizes(hf, eps=1e-7)
        for name in ("embedding_size", "pooler_hidden_size"):
            field_of(hf, name, int, default=sizes["hidden"], one_of={sizes["hidden"]})
        size = sizes["head_dim"]
        field_of(hf, "attention_head_size", int, default=size, one_of={size})
        stated = hf.get("pos_att_type")
        terms = stated.split("|") if isinstance(stated, str) else stated or []
        if set(terms) - set(TERMS):
            field_of({"pos_att_type": "|".join(terms)}, "pos_att_type", str, one_of={"c2p|p2c"})
        reach = field_of(hf, "max_relative_positions", int, default=-1)
        types = field_of(hf, "type_vocab_size", int, default=0)
        learned = field_of(hf, "position_biased_input", bool, default=True)
        return cls(
            **sizes | {"positions": sizes["max_len"] if learned else 0},
            types=(types,) if types else (),
            buckets=max(field_of(hf, "position_buckets", int, default=-1), 0),
            max_distance=reach if reach > 0 else sizes["max_len"],
            terms=tuple(one for one in TERMS if one in terms),
            shared=field_of(hf, "share_att_key", bool, default=False),
            normed="layer_norm" in field_of(hf, "norm_rel_ebd", str, default="none"),
            head_act=field_of(
                hf, "pooler_hidden_act", str, default="gelu", one_of={*ACTIVATION_KINDS, "tanh"}
            ),
        )


def bucket_of(distance: int, buckets: int, max_distance: int, span: int) -> int:
    """Return the number of a distance's vector, from key to query."""
    middle = buckets // 2
    if buckets and abs(distance) > middle:
        # in float32, as the models were trained: a distance at an edge falls into the same bucket
        share = torch.log(torch.tensor(abs(distance) / middle)) / torch.log(
            torch.tensor((max_distance - 1) / middle)
        )
        distance = int(math.copysign(float(torch.ceil(share * (middle - 1))) + middle, distance))
    return min(max(distance + span, 0), 2 * span - 1)


FOR_POSITIONS = (
    "vectors of positions pass through it, and are computed once for all requests; train an "
    "adapter without it"
)


class CountedQKV(QKVLinear):
    """Counts how often weights were loaded: what was made of them is made again."""

    loads = 0

    def after_load(self, dtype: torch.dtype) -> None:
        super().after_load(dtype)
        self.loads += 1


class SelfAttention(nn.Module):
    """vectors: yields those of distances [P, E]."""

    def __init__(self, c: Config, vectors: Callable[[], Tensor]) -> None:
        super().__init__()
        self.__dict__["vectors"] = vectors
        self.terms, self.shared = c.terms, c.shared
        self.qkv_proj = CountedQKV(c.hidden, c.heads, c.heads, c.head_dim, bias=True)
        if c.shared:
            self.qkv_proj.adapter_refusal = FOR_POSITIONS
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, bias=True)
        if not c.shared:
            if "c2p" in c.terms:
                self.pos_key_proj = QueryLinear(c.hidden, c.heads, c.head_dim, bias=True)
                self.pos_key_proj.adapter_refusal = FOR_POSITIONS
            if "p2c" in c.terms:
                self.pos_query_proj = QueryLinear(c.hidden, c.heads, c.head_dim, bias=True)
                self.pos_query_proj.adapter_refusal = FOR_POSITIONS
        self.attn = DisentangledAttention(
            c.heads,
            c.head_dim,
            scale=(c.head_dim * (1 + len(c.terms))) ** -0.5,
            buckets=partial(bucket_of, buckets=c.buckets, max_distance=c.max_distance, span=c.span),
            reach=c.max_len,
        )
        self._loads = 0
        self._positions: tuple[Tensor | None, Tensor | None] = (None, None)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        keys, queries = self.positions()
        return self.out_proj(self.attn(q, k, v, keys, queries, step.attention))

    def positions(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and queries of distances, each [P, H, D], or None if there is no such term."""
        if self._loads != self.qkv_proj.loads:
            self._positions = self._project(self.__dict__["vectors"]())
            self._loads = self.qkv_proj.loads
        return self._positions

    def _project(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        keys = queries = None
        if self.shared:
            queries, keys, _ = self.qkv_proj(vectors)
        if not self.shared and "c2p" in self.terms:
            (keys,) = self.pos_key_proj(vectors)
        if not self.shared and "p2c" in self.terms:
            (queries,) = self.pos_query_proj(vectors)
        lazy_fusion.flush()
        return (
            keys.contiguous() if keys is not None and "c2p" in self.terms else None,
            queries.contiguous() if queries is not None and "p2c" in self.terms else None,
        )


class Layer(EncoderLayer):
    def __init__(self, c: Config, layer: int, vectors: Callable[[], Tensor]) -> None:
        super().__init__(c, layer)
        self.self_attn = SelfAttention(c, vectors)


class Model(Encoder):
    is_recordable = False  # the first forward makes keys and queries of distances
    lm_act = None
    weights = Weights(
        strip=("deberta.",),
        paths={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.LayerNorm": "embed_norm",
            "embeddings": "",
            "encoder.rel_embeddings": "rel_embeddings",
            "encoder.LayerNorm": "rel_norm",
            **LAYERS,
            "pooler.dense": "head.dense",
            "classifier": "head.out_proj",
            "cls.predictions.transform.dense": "lm_transform.dense",
            "cls.predictions.transform.LayerNorm": "lm_transform.norm",
            "cls.predictions.decoder": "lm_head",
            "cls.predictions": "lm_bias",
            "lm_predictions.lm_head.dense": "lm_transform.dense",
            "lm_predictions.lm_head.LayerNorm": "lm_transform.norm",
            "lm_predictions.lm_head": "lm_bias",
        },
        fuse={"qkv_proj": ("query_proj", "key_proj", "value_proj")},
        ignore=("*embeddings.position_ids", "cls.predictions.decoder.bias", "mask_predictions.*"),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        if c.head == "classify":
            self.head = ClassificationHead(c, c.head_act)
        kinds = "token_type_embeddings"
        if c.positions:
            fuse = {**self.weights.fuse, "embed_positions": ("position_embeddings", kinds)}
            self.weights = replace(self.weights, fuse=fuse)
        else:
            paths = {**self.weights.paths, kinds: "embed_positions"}
            self.weights = replace(self.weights, paths=paths)

    def build_positions(self, c: EncoderConfig) -> nn.Module | None:
        if c.positions:
            return super().build_positions(c)
        return TypeEmbedding(c.max_len, c.word_size, *c.types) if c.types else None

    def build_layers(self, c: ModelConfig) -> nn.ModuleList:
        """All layers, in order."""
        assert isinstance(c, Config)
        self.rel_embeddings = PositionEmbedding(2 * c.span, c.hidden)
        self.rel_norm = LayerNorm(c.hidden, c.norm_eps) if c.normed else None
        return nn.ModuleList(Layer(c, i, self.vectors) for i in range(c.layers))

    def vectors(self) -> Tensor:
        """Those of distances [P, E]."""
        found = self.rel_embeddings.weight
        return found if self.rel_norm is None else self.rel_norm(found)
