"""Mixtral: Mistral with a few wide experts for an MLP, two of them for each token.

Source: model_type "mixtral", https://huggingface.co/mistralai/Mixtral-8x7B-v0.1; transformers
        modeling_mixtral.py
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
from quire.models import llama
from quire.models._decoder import Decoder, PreNormLayer
from quire.models._experts import expert_counts
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, Weights

CONVENTIONS = {"defaults": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    experts: int
    top_k: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        experts, top_k = expert_counts(hf)
        return cls(
            **sizes,
            windows=read_uniform_windows(hf, sizes["layers"]),
            experts=experts,
            top_k=top_k,
        )


class SparseMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = Router(c.hidden, c.experts, RoutingMethod(c.top_k, renormalise=True))
        self.experts = Experts(
            c.hidden, c.mlp, c.experts, ExpertActivation(ACTIVATION_KINDS[c.act])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Layer(PreNormLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(layer))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = SparseMLP(c)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        rename={"block_sparse_moe": "mlp"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        experts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
