"""Encoder-decoder skeleton: an encoder over packed sources, and a decoder that reads its output.

`encode` runs when a source is new: it writes keys and values of the encoder's output to the cache,
for the cross attention of every decoder layer. Steps of the decoder read them there.

Axes: T tokens in the step or of all sources, E hidden, F mlp width, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn

from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    Attention,
    ColumnLinear,
    CrossAttention,
    EncoderAttention,
    KVLinear,
    LogitsBias,
    QKVLinear,
    QueryLinear,
    RowLinear,
    add,
)
from quire.models._decoder import Decoder
from quire.models.base import (
    CarriedStates,
    EncodesMedia,
    Hf,
    ModelConfig,
    SourceInputs,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """Fields of ModelConfig are those of the decoder."""

    encoder_layers: int
    encoder_heads: int
    encoder_mlp: int
    source_hidden: int | None = None  # of the encoder's output; None: as of the decoder

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        """Each decoder layer has self-attention and cross attention."""
        own = LayerFacts(self.kv_heads, self.head_dim)
        return (own, replace(own, cross=True)) * self.layers


class PackedSources(Protocol):
    """Where each source is among packed ones. Fields as of SourceInputs."""

    @property
    def starts(self) -> Tensor: ...

    @property
    def longest(self) -> int: ...


class SourceReader(Protocol):
    """A decoder layer with cross attention."""

    def write_source(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache what cross attention reads of the encoder's output [T, E]."""
        ...


class EncoderDecoder(Decoder):
    """Base of models with an encoder. Its decoder layers are SourceReaders."""

    def __init__(self, c: Any) -> None:
        super().__init__(c)
        self.encoder = self.build_encoder(c)

    def build_encoder(self, c: Any) -> nn.Module:
        """Called with vectors [T, E] and their SourceInputs, it returns hidden states [T, E]."""
        raise NotImplementedError

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        raise ConfigError(
            "models with an encoder and a decoder generate only: they cannot be pooling models"
        )

    def encode(self, source: SourceInputs) -> None:
        """Run the encoder, and write keys and values of its output to the cache."""
        hidden = self.encode_source(source)
        for layer in self.layers:
            cast(SourceReader, layer).write_source(hidden, source)

    def encode_source(self, source: SourceInputs) -> Tensor:
        """Return the encoder's output [T, E]. Rows of media are in place of embeddings."""
        vectors: Tensor = self.embed_tokens(source.token_ids)
        if source.media:
            encoder = cast(EncodesMedia, self.media_encoder)
            lazy_fusion.flush()
            rows = torch.cat(encoder.encode(source.media))
            lazy_fusion.flush()
            vectors[source.media_rows] = rows.to(vectors.dtype)
        hidden: Tensor = self.encoder(vectors, source)
        return hidden


class SourceAttention(nn.Module):
    """Cross attention with its projections. The names are those of BART's checkpoints."""

    def __init__(self, c: EncoderDecoderConfig) -> None:
        super().__init__()
        self.q_proj = QueryLinear(c.hidden, c.heads, c.head_dim, bias=True)
        inputs = c.hidden if c.source_hidden is None else c.source_hidden
        self.kv_proj = KVLinear(inputs, c.kv_heads, c.head_dim, bias=True)
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, bias=True)
        self.attn = CrossAttention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        (q,) = self.q_proj(x)
        return self.out_proj(self.attn(q, step.attention))

    def write(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache keys and values of the encoder's output [T, E]."""
        k, v = self.kv_proj(hidden)
        self.attn.write(k, v, source.slots, source.attention)


class OwnAttention(nn.Module):
    """Self-attention of the decoder."""

    def __init__(self, c: EncoderDecoderConfig) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, bias=True)
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, bias=True)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.out_proj(self.attn(q, k, v, step.attention))


class BidirectionalAttention(nn.Module):
    """Self-attention of an encoder."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        size = hidden // heads
        self.qkv_proj = QKVLinear(hidden, heads, heads, size, bias=True)
        self.out_proj = RowLinear(hidden, hidden, bias=True)
        self.attn = EncoderAttention(size)

    def forward(self, x: Tensor, source: PackedSources) -> Tensor:
        q, k, v = self.qkv_proj(x)
        return self.out_proj(self.attn(q, k, v, source.starts, source.longest))


class PostNormLayer(nn.Module):
    """An MLP, and norms after each part's sum with its input. Base of the two kinds of layers."""

    def __init__(self, c: EncoderDecoderConfig, mlp: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden, mlp, bias=True)
        self.act = Activation(c.act)
        self.fc2 = RowLinear(mlp, c.hidden, bias=True)
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)

    def finish(self, x: Tensor) -> Tensor:
        """The MLP and the last norm."""
        return self.final_layer_norm(self.fc2(self.act(self.fc1(x))), x)[0]


class PostNormEncoderLayer(PostNormLayer):
    def __init__(self, c: EncoderDecoderConfig) -> None:
        super().__init__(c, c.encoder_mlp)
        self.self_attn = BidirectionalAttention(c.hidden, c.encoder_heads)

    def forward(self, x: Tensor, source: SourceInputs) -> Tensor:
        x = self.self_attn_layer_norm(self.self_attn(x, source), x)[0]
        return self.finish(x)


class PostNormDecoderLayer(PostNormLayer):
    def __init__(self, c: EncoderDecoderConfig, layer: int) -> None:
        super().__init__(c, c.mlp)
        self.self_attn = OwnAttention(c)
        self.encoder_attn = SourceAttention(c)
        self.encoder_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x = self.self_attn_layer_norm(self.self_attn(x, step), x)[0]
        x = self.encoder_attn_layer_norm(self.encoder_attn(x, step), x)[0]
        return self.finish(x), None

    def write_source(self, hidden: Tensor, source: SourceInputs) -> None:
        self.encoder_attn.write(hidden, source)


EPS = 1e-5  # not in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormConfig(EncoderDecoderConfig):
    """Config of models with PostNormLayers, under the names of BART's config.json."""

    positions: int  # that both stacks have vectors of

    @classmethod
    def from_hf(cls, hf: Hf) -> Self:
        field_of(hf, "is_encoder_decoder", bool, default=False, one_of={True})
        names = ("d_model", "decoder_attention_heads", "encoder_attention_heads")
        hidden, heads, encoder_heads = (field_of(hf, name, int) for name in names)
        if hidden % heads or hidden % encoder_heads:
            raise ConfigError(
                f"config.json: decoder_attention_heads ({heads}) and encoder_attention_heads "
                f"({encoder_heads}) must divide d_model, which is {hidden}"
            )
        positions = field_of(hf, "max_position_embeddings", int)
        scaled = field_of(hf, "scale_embedding", bool, default=False)
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=field_of(hf, "decoder_layers", int),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=field_of(hf, "decoder_ffn_dim", int),
            max_len=positions,
            norm_eps=EPS,
            act=field_of(hf, "activation_function", str, default="gelu", one_of=ACTIVATION_KINDS),
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            embed_scale=hidden**0.5 if scaled else 1.0,
            encoder_layers=field_of(hf, "encoder_layers", int),
            encoder_heads=encoder_heads,
            encoder_mlp=field_of(hf, "encoder_ffn_dim", int),
            positions=positions,
        )


class PostNormEncoder(nn.Module):
    def __init__(self, c: PostNormConfig, model: type[PostNormModel]) -> None:
        super().__init__()
        self.embed_positions = model.build_positions(c)
        self.layernorm_embedding = model.build_embedding_norm(c)
        self.layers = nn.ModuleList(PostNormEncoderLayer(c) for _ in range(c.encoder_layers))

    def forward(self, x: Tensor, source: SourceInputs) -> Tensor:
        """x [T, E] of packed sources -> [T, E]."""
        x = self.layernorm_embedding(add(x, self.embed_positions(source.positions)))
        for layer in self.layers:
            x = layer(x, source)
        return x


class PostNormModel(EncoderDecoder):
    """Base of BART and its like. The token embedding is that of both stacks and of the head."""

    layer_class = PostNormDecoderLayer
    weights = Weights(
        strip=("model.decoder.", "decoder.", "model."),
        rename={"shared": "embed_tokens"},
        alias={"final_logits_bias": "final_logits_bias.bias"},
        fuse={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "encoder_attn.kv_proj": ("k_proj", "v_proj"),
        },
        ignore=(
            "*encoder.embed_tokens.weight",
            "*decoder.embed_tokens.weight",
            "*coder.version",
        ),
        tie={"lm_head": "embed_tokens"},
    )  # fmt: skip

    def __init__(self, c: PostNormConfig) -> None:
        super().__init__(c)
        self.norm = None
        self.embed_positions = self.build_positions(c)
        self.layernorm_embedding = self.build_embedding_norm(c)
        # Wrappers have an output head of their own.
        self.final_logits_bias = LogitsBias(self.lm_head) if c.wrapper_type is None else None

    @staticmethod
    def build_positions(c: PostNormConfig) -> nn.Module:
        """Positions [T] -> vectors [T, E]; each stack has its own."""
        raise NotImplementedError

    @staticmethod
    def build_embedding_norm(c: PostNormConfig) -> nn.Module:
        """The norm of embeddings with their positions; each stack has its own."""
        return nn.Identity()

    def build_encoder(self, c: PostNormConfig) -> nn.Module:
        return PostNormEncoder(c, type(self))

    def embed(self, step: StepInputs) -> Tensor:
        x = add(super().embed(step), self.embed_positions(step.positions))
        return self.layernorm_embedding(x)

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        return x
