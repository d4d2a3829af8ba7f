"""Llama 4, its text half: Llama with experts, whose inputs are weighted, some layers unrotated.

    rotated layers       attend in chunks of `attention_chunk_size` tokens; q and k are normed
    every fourth layer   attends to all tokens; queries grow with their position

A context is one chunk here: within it both kinds see all tokens before.

Source: model_type "llama4_text", https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E;
        transformers modeling_llama4.py
Axes:   T tokens in the step, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.weighted_inputs import weighted_inputs
from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    ExpertActivation,
    Experts,
    Rope,
    RopeConfig,
    RopeTemperature,
    Router,
    RoutingMethod,
    UnitRMSNorm,
    add,
)
from quire.layers.rope_scaling import Unrotated
from quire.models import llama
from quire.models._decoder import GatedMLP, PreNormLayer
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of
from quire.models.smollm3 import rotated_layers

CONVENTIONS = {
    "defaults": {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "max_position_embeddings": 131_072,
    },
    "nested_defaults": {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    rotated: tuple[bool, ...]  # per layer
    sparse: tuple[bool, ...]  # per layer: it has experts
    experts: int
    dense_mlp: int  # width of the MLP of layers without experts
    qk_norm: bool
    temperature: RopeTemperature | None  # None: queries do not grow

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes, bias = rotary_sizes_of(hf), field_of(hf, "attention_bias", bool, default=False)
        field_of(hf, "num_experts_per_tok", int, one_of={1})
        chunk = field_of(hf, "attention_chunk_size", int)
        sizes["max_len"] = min(sizes["max_len"], chunk)
        return cls(
            **sizes,
            interleaved=True,
            qkv_bias=bias,
            o_bias=bias,
            rotated=rotated_layers(hf, sizes["layers"]),
            sparse=_sparse(hf, sizes["layers"]),
            experts=field_of(hf, "num_local_experts", int),
            dense_mlp=field_of(hf, "intermediate_size_mlp", int, default=16_384),
            qk_norm=field_of(hf, "use_qk_norm", bool, default=True),
            temperature=_temperature(hf),
        )


def _sparse(hf: Hf, layers: int) -> tuple[bool, ...]:
    step = field_of(hf, "interleave_moe_layer_step", int, default=1)
    if step < 1:
        raise ConfigError(f"config.json: interleave_moe_layer_step is {step}; it must be 1 or more")
    found = field_of(hf, "moe_layers", list, default=list(range(step - 1, layers, step)))
    return tuple(i in found for i in range(layers))


def _temperature(hf: Hf) -> RopeTemperature | None:
    if not field_of(hf, "attn_temperature_tuning", bool, default=True):
        return None
    length = field_of(hf, "floor_scale", int, default=8192)
    return RopeTemperature(field_of(hf, "attn_scale", float, default=0.1), length, first=1)


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config, *, rotated: bool) -> None:
        super().__init__(c, None)
        if not rotated:
            self.rope = None
            if c.temperature is not None:
                config = RopeConfig(1.0, c.head_dim, Unrotated(), c.temperature)
                self.rope = Rope(config, c.max_len, interleaved=True)
        elif c.qk_norm:  # after the rotation in theirs: it changes no length
            self.q_norm = UnitRMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = UnitRMSNorm(c.head_dim, c.norm_eps)
        self.rotated = rotated

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        if self.rotated or self.rope is None:
            return super().forward(x, step)
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        grown, _ = self.rope(q, k[:, :1], step.positions)  # a rotation takes both
        return self.o_proj(self.attn(grown, k, v, step.attention))


class WeightedExperts(nn.Module):
    """One expert of each token, which reads weighted inputs, and one that all tokens share."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.router = Router(c.hidden, c.experts, RoutingMethod(1, "sigmoid"))
        gate = ExpertActivation(ACTIVATION_KINDS[c.act])
        self.experts = Experts(c.hidden, c.mlp, c.experts, gate, turned=True)
        self.shared_expert = GatedMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        weighted, ones = weighted_inputs(x, weights)
        return add(self.experts(weighted, ids, ones), self.shared_expert(x))


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, rotated=c.rotated[i])
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = WeightedExperts(c) if c.sparse[i] else GatedMLP(c.hidden, c.dense_mlp, c.act)


class Model(llama.Model):
    layer_class = Layer
    weights = replace(llama.Model.weights, rename={"feed_forward": "mlp"})
