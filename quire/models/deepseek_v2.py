"""DeepSeek-V2 and V2-Lite: latent attention, and from some layer on a choice of experts.

Source: model_type "deepseek_v2", https://huggingface.co/deepseek-ai/DeepSeek-V2; arXiv 2405.04434;
        transformers modeling_deepseek_v2.py
Axes:   T tokens in the step, E hidden, F width of an expert, H query heads, V vocab
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.config.memory.kv_layout import LayerFacts
from quire.layers import (
    AddRMSNorm,
    ColumnLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    RoutingMethod,
    RowLinear,
)
from quire.layers.mla import MLAAttention, MLADownProjection, MLASizes, MLAUpProjection
from quire.models._decoder import Decoder, PreNormLayer, spare_names
from quire.models._experts import RoutedSizes, check_routing, mlp_of_layer, routed_sizes
from quire.models._rope import rope_of, scaled_max_len, section_of
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of, sizes_of

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries and latents, whatever rms_norm_eps is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    attention: MLASizes
    scale: float
    interleaved: bool = True
    moe: RoutedSizes
    spare_layers: int = 0  # of the checkpoint, after the last: they predict further tokens (MTP)

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**shared_fields(hf), moe=routed_sizes(hf, routing_of(hf)))

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        kept = LayerFacts(1, self.attention.cache_dim, latent=self.attention.latent_dim)
        return (kept,) * self.layers


def shared_fields(hf: Hf) -> dict[str, Any]:
    """Read the fields that V2 and V3 have in common."""
    field_of(hf, "attention_bias", bool, default=False, one_of=(False,))
    sizes = sizes_of({**hf, "num_key_value_heads": 1, "head_dim": 1})
    attention = latent_sizes(hf, sizes["heads"])
    return {
        **sizes,
        "head_dim": attention.query_dim,
        "max_len": scaled_max_len(hf),
        "rope": rope_of(hf, attention.rope_dim),
        "attention": attention,
        "scale": scale_of(hf, attention),
    }


def latent_sizes(hf: Hf, heads: int) -> MLASizes:
    """The shape of the attention layers."""
    return MLASizes(
        heads=heads,
        nope_dim=field_of(hf, "qk_nope_head_dim", int),
        rope_dim=field_of(hf, "qk_rope_head_dim", int),
        value_dim=field_of(hf, "v_head_dim", int),
        latent_dim=field_of(hf, "kv_lora_rank", int),
        q_rank=field_of(hf, "q_lora_rank", int, default=None),
    )


def scale_of(hf: Hf, attention: MLASizes) -> float:
    """Return the scale of the scores: a stretched model multiplies it by mscale_all_dim, twice."""
    part, heat = section_of(hf), 1.0
    hotter = part.number("mscale_all_dim", 0.0)
    if part.kind != "default" and hotter and part.factor > 1:
        heat = 0.1 * hotter * math.log(part.factor) + 1.0
    return float(attention.query_dim**-0.5 * heat * heat)


def routing_of(hf: Hf) -> RoutingMethod:
    """Softmax over all experts; the best ones, or the best ones of the best groups."""
    field_of(hf, "scoring_func", str, default="softmax", one_of=("softmax",))
    field_of(hf, "norm_topk_prob", bool, default=False, one_of=(False,))
    methods = ("greedy", "group_limited_greedy")
    method = field_of(hf, "topk_method", str, default="greedy", one_of=methods)
    top_k = field_of(hf, "num_experts_per_tok", int)
    scale = field_of(hf, "routed_scaling_factor", float, default=1.0)
    if method == "greedy":
        return check_routing(hf, RoutingMethod(top_k, scale=scale))
    groups, top_groups = field_of(hf, "n_group", int), field_of(hf, "topk_group", int)
    return check_routing(
        hf, RoutingMethod(top_k, scale=scale, groups=groups, top_groups=top_groups)
    )


class SelfAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        sizes = c.attention
        self.inputs = MLADownProjection(c.hidden, sizes)
        if sizes.q_rank is not None:
            self.q_a_layernorm = RMSNorm(sizes.q_rank, LATENT_EPS)
            self.q_b_proj = ColumnLinear(sizes.q_rank, sizes.heads * sizes.query_dim)
        self.kv_a_layernorm = RMSNorm(sizes.latent_dim, LATENT_EPS)
        self.kv_b_proj = MLAUpProjection(sizes)
        self.o_proj = RowLinear(sizes.heads * sizes.value_dim, c.hidden)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = MLAAttention(sizes, c.scale, c.interleaved)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, kv = self.inputs(x)
        if self.attn.sizes.q_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        parts = (self.kv_a_layernorm, self.kv_b_proj, self.rope)
        return self.o_proj(self.attn(q, kv, *parts, step.positions, step.attention))


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = mlp_of_layer(c, c.moe, i)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={
            "inputs": ("q_a_proj", "kv_a_proj_with_mqa"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.weights = weights_of(c)


def weights_of(c: Config) -> Weights:
    """Queries that are not compressed have another name; layers beyond the last are left out."""
    first = "q_proj" if c.attention.q_rank is None else "q_a_proj"
    fuse = {**Model.weights.fuse, "inputs": (first, "kv_a_proj_with_mqa")}
    return replace(Model.weights, fuse=fuse, absent=spare_names(c.layers, c.spare_layers))
