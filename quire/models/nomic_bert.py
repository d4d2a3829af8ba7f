"""Nomic BERT, of nomic-embed-text v1 to v2: BERT with rotary positions, gated or with experts.

config.json files of Nomic have the names of GPT-2. The extension of the context that some state
depends on the longest text of a batch, so texts are served up to the length of training.

Source: model_type "nomic_bert", https://huggingface.co/nomic-ai/nomic-embed-text-v1.5 and
nomic-embed-text-v2-moe; transformers modeling_nomic_bert.py
Axes:   T tokens in the step, E hidden, F mlp width, X experts, k experts of a token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.kernels.moe_experts import moe_experts
from quire.layers import ExpertActivation, ParamModule, Router, RoutingMethod
from quire.models._rotary_encoder import (
    RotaryEncoder,
    RotaryEncoderConfig,
    RotaryEncoderLayer,
    rotary_encoder_sizes,
)
from quire.models.base import Hf, Weights, field_of
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

CONVENTIONS = {"tied": True, "bidirectional": True}

USUAL_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_emb_fraction",
}
GATED = {"swiglu": "silu", "geglu": "gelu"}
"""Activation of a gated MLP -> that of its gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RotaryEncoderConfig):
    experts: int = 0  # of each layer that has any
    experts_per_token: int = 0
    expert_every: int = 0  # the second of as many layers has experts; 0: none has
    renormalise: bool = False  # weights of a token's experts sum to 1

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        for name in ("prenorm", "parallel_block", "use_rms_norm", "causal", "expert_choice_router"):
            field_of(hf, name, bool, default=False, one_of={False})
        usual = {ours: hf[theirs] for ours, theirs in USUAL_NAMES.items() if hf.get(theirs)}
        act = usual.get("hidden_act")
        if act in GATED:
            usual["hidden_act"] = GATED[act]
        sizes = rotary_encoder_sizes({"hidden_act": "silu", **hf, **usual}, theta=1000.0)
        trained = field_of(hf, "max_trained_positions", int, default=sizes["max_len"])
        attention_bias = field_of(hf, "qkv_proj_bias", bool, default=False)
        return cls(
            **{**sizes, "max_len": min(trained, sizes["max_len"])},
            interleaved=field_of(hf, "rotary_emb_interleaved", bool, default=False),
            gated=act is None or act in GATED,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            up_bias=field_of(hf, "mlp_fc1_bias", bool, default=False),
            down_bias=field_of(hf, "mlp_fc2_bias", bool, default=False),
            experts=field_of(hf, "num_experts", int, default=0),
            experts_per_token=field_of(hf, "moe_top_k", int, default=0),
            expert_every=field_of(hf, "moe_every_n_layers", int, default=0),
            renormalise=field_of(hf, "moe_normalize_expert_weights", bool, default=False),
        )


class UngatedExperts(ParamModule):
    """A bank of MLPs without gates, and one bias for their sum.

    For the kernel each has a gate: the factor is a product with zeros, plus one.
    """

    w1: Tensor  # [X * F, E]; once loaded [X, 2F, E], with zeros below
    w2: Tensor  # [X * F, E]; once loaded [X, E, F]
    bias: Tensor  # [E]
    gate_bias: Tensor  # [X, 2F]: zeros, and ones below

    def __init__(self, hidden: int, mlp: int, experts: int, act: str) -> None:
        super().__init__()
        self.hidden, self.mlp, self.experts = hidden, mlp, experts
        self.gate = ExpertActivation("gelu_tanh" if "tanh" in act else "gelu")
        self.declare("w1", "w2", "bias")

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, E], ids and weights [T, k] of the router -> [T, E]."""
        y = moe_experts(x, ids, weights, self.w1, self.w2, self.gate, self.gate_bias)
        lazy_fusion.flush()
        return y + self.bias

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        rows = (self.experts * self.mlp,)
        return unsharded_layout((self.hidden,) if param == "bias" else (*rows, self.hidden))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.02 if param == "bias" else self.hidden**-0.5)

    def after_load(self, dtype: torch.dtype) -> None:
        up, down = (w.detach().view(self.experts, self.mlp, -1) for w in (self.w1, self.w2))
        gate_bias = up.new_zeros(self.experts, 2 * self.mlp)
        gate_bias[:, self.mlp :] = 1
        self.set_param("w1", torch.cat((up, torch.zeros_like(up)), dim=1))
        self.set_param("w2", down.transpose(1, 2).contiguous())
        self.set_param("gate_bias", gate_bias)


class ExpertMLP(nn.Module):
    """[T, E] -> [T, E]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        routing = RoutingMethod(c.experts_per_token, renormalise=c.renormalise)
        self.router = Router(c.hidden, c.experts, routing)
        self.experts = UngatedExperts(c.hidden, c.mlp, c.experts, c.act)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.router(x))


class Layer(RotaryEncoderLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        if c.expert_every and layer % c.expert_every == 1:
            self.mlp = ExpertMLP(c)


class Model(RotaryEncoder):
    layer_class = Layer
    weights = Weights(
        strip=("nomic_bert.", "bert."),
        paths={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.token_type_embeddings": "embed_positions",
            "embeddings.LayerNorm": "embed_norm",
            "emb_ln": "embed_norm",
            "encoder.layers": "layers",
            "attn": "self_attn",
            "self_attn.Wqkv": "self_attn.qkv_proj",
            "self_attn.o_proj": "self_attn.out_proj",
            "norm1": "self_attn_layer_norm",
            "post_attention_layernorm": "self_attn_layer_norm",
            "norm2": "final_layer_norm",
            "post_mlp_layernorm": "final_layer_norm",
            "mlp.fc1": "mlp.gate_up_proj",  # without a gate
            "mlp.fc11": "mlp.up_proj",
            "mlp.fc12": "mlp.gate_proj",
            "mlp.fc2": "mlp.down_proj",
            "router.layer": "router",
            "experts.mlp": "experts",
            "pooler.dense": "head.dense",
            "classifier": "head.out_proj",
            "cls.predictions.transform.dense": "lm_transform.dense",
            "cls.predictions.transform.layer_norm": "lm_transform.norm",
            "cls.predictions.decoder": "lm_head",
            "cls.predictions": "lm_bias",
        },
        fuse={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        ignore=("*embeddings.position_ids", "*rotary_emb.inv_freq", "cls.predictions.decoder.bias"),
        tie={"lm_head": "embed_tokens"},
    )
