"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all or some layers.

Source: model_type "qwen3_moe", https://huggingface.co/Qwen/Qwen3-30B-A3B; transformers
        modeling_qwen3_moe.py
Axes:   T tokens in the step, E hidden, F width of an expert, X experts, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    ExpertActivation,
    Experts,
    Router,
    RoutingMethod,
)
from quire.models import qwen3
from quire.models._decoder import Decoder, GatedMLP, PreNormLayer
from quire.models._experts import ExpertSizes, expert_sizes
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {"windows_on_request": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen3.Config):
    moe: ExpertSizes
    turned_experts: bool = False  # tensors of all experts are [X, inputs, outputs]

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        bias = field_of(hf, "attention_bias", bool, default=False)
        windowed = field_of(hf, "use_sliding_window", bool, default=False)
        return cls(
            **sizes,
            qkv_bias=bias,
            o_bias=bias,
            windows=read_uniform_windows(hf, sizes["layers"]) if windowed else (),
            moe=expert_sizes(hf),
        )


class SparseMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        routing = RoutingMethod(c.moe.top_k, renormalise=c.moe.renormalise)
        self.gate = Router(c.hidden, c.moe.experts, routing)
        act = ExpertActivation(ACTIVATION_KINDS[c.act])
        self.experts = Experts(c.hidden, c.moe.mlp, c.moe.experts, act, turned=c.turned_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = qwen3.SelfAttention(c, c.window(i))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = SparseMLP(c) if c.moe.is_sparse(i) else GatedMLP(c.hidden, c.mlp, c.act)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
