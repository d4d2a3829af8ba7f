"""Llama-3.2-Vision, its text half: Llama, and between its layers others that attend to images.

    x = x + tanh(g1) * cross_attn(norm(x))      a token that sees no image skips both
    x = x + tanh(g2) * mlp(norm(x))

They are not loaded without the vision encoder: they add nothing where there is no image. In
transformers, tokens before the first image skip the second sum alone; Meta's own code, which the
model was trained with, skips both, so that text before an image does not depend on it. The
embedding has eight rows more than the head, for images.

Source: model_type "mllama_text_model", https://huggingface.co/meta-llama/Llama-3.2-11B-Vision;
        transformers modeling_mllama.py; Meta, llama-models, multimodal/model.py
Axes:   T tokens of the step or of all sources, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from quire.attention.base import CrossAttentionStep
from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError, QuireError
from quire.kernels.framework import lazy_fusion
from quire.kernels.native.op_tape import on_replay
from quire.layers import (
    AddRMSNorm,
    CrossAttention,
    Embedding,
    KVLinear,
    ParamModule,
    QueryLinear,
    RMSNorm,
    RowLinear,
)
from quire.models import llama
from quire.models._decoder import Decoder, GatedMLP, MissingLayer
from quire.models._rope import rotary_sizes_of
from quire.models.base import (
    CarriedStates,
    EncodesMedia,
    Hf,
    SourceInputs,
    SourceSwitch,
    StepInputs,
    field_of,
)
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

IMAGE_ROWS = 8
CONVENTIONS = {
    "uncached_layers": "cross_attention_layers",
    "source": "images",
    "defaults": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
    },
    "nested_defaults": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    cross_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes, cross = rotary_sizes_of(hf), field_of(hf, "cross_attention_layers", list)
        if len(set(cross)) != len(cross) or not set(cross) < set(range(sizes["layers"])):
            raise ConfigError(
                f"config.json: cross_attention_layers is {cross!r:.80}; it must be different "
                f"numbers of layers, of which there are {sizes['layers']}"
            )
        return cls(**sizes, cross_layers=tuple(cross))

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        facts = super(Config, self).attention_layers()
        if self.media is None:
            return facts[len(self.cross_layers) :]
        return tuple(replace(one, cross=i in self.cross_layers) for i, one in enumerate(facts))


class ImageAttention(nn.Module):
    """Cross attention whose queries and keys are normed."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.q_proj = QueryLinear(c.hidden, c.heads, c.head_dim)
        self.kv_proj = KVLinear(c.hidden, c.kv_heads, c.head_dim)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.attn = CrossAttention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        (q,) = self.q_proj(x)
        return self.o_proj(self.attn(self.q_norm(q), step.attention))


class ImageLayer(ParamModule):
    """A layer that attends to images. switch: whether it runs at all."""

    cross_attn_attn_gate: Tensor
    cross_attn_mlp_gate: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.switch = SourceSwitch()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.cross_attn = ImageAttention(c)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.declare("cross_attn_attn_gate", "cross_attn_mlp_gate")

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        if not self.switch.on:
            return x, res
        seen = cast(CrossAttentionStep, step.attention).source_lengths
        x, res = self.input_layernorm(x, res)
        x = on_replay(_gated, self.cross_attn(x, step), self.cross_attn_attn_gate, seen)
        x, res = self.post_attention_layernorm(x, res)
        return on_replay(_gated, self.mlp(x), self.cross_attn_mlp_gate, seen), res

    def write_source(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache keys and values of the encoder's output [T, E]."""
        attention = self.cross_attn
        k, v = attention.kv_proj(hidden)
        attention.attn.write(attention.k_norm(k), v, source.slots, source.attention)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((1,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.5, 0.1)


def _gated(x: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
    """x [T, E] * tanh(gate [1]); 0 of a token that sees nothing. seen: [T] int32."""
    lazy_fusion.flush()
    factor = torch.where(seen > 0, gate.float().tanh(), 0.0)
    return (x.float() * factor[:, None]).to(x.dtype)


def _layer(c: Config, layer: int) -> nn.Module:
    if layer not in c.cross_layers:
        return llama.Layer(c, layer)
    return MissingLayer() if c.media is None else ImageLayer(c)


class Model(Decoder):
    layer_class = staticmethod(_layer)
    weights = llama.Model.weights

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_tokens = Embedding(c.vocab + IMAGE_ROWS, c.hidden)
        absent = () if c.media else tuple(f"layers.{i}." for i in c.cross_layers)
        fuse = {**self.weights.fuse, "cross_attn.kv_proj": ("k_proj", "v_proj")}
        self.weights = replace(self.weights, absent=absent, fuse=fuse)
        self.source_switch = SourceSwitch()
        for layer in self.layers:
            if isinstance(layer, ImageLayer):
                layer.switch = self.source_switch

    def encode(self, source: SourceInputs) -> None:
        """Encode images, and write keys and values of their rows to the cache."""
        rows = torch.cat(cast(EncodesMedia, self.media_encoder).encode(source.media))
        if len(rows) != len(source.slots):
            raise QuireError(f"{len(rows)} rows of images were made, not {len(source.slots)}")
        for layer in self.layers:
            if isinstance(layer, ImageLayer):
                layer.write_source(rows, source)
