"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with a choice of experts beside one that all tokens share.

Source: model_type "qwen2_moe", https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B; transformers
        modeling_qwen2_moe.py
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
    Linear,
    Router,
    RoutingMethod,
    gated_add,
)
from quire.models import llama
from quire.models._decoder import Decoder, GatedMLP, PreNormLayer
from quire.models._experts import ExpertSizes, expert_sizes
from quire.models._rope import rotary_sizes_of
from quire.models._windows import FULL, SLIDING, windows_of
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {"windows": "alternate", "window": 4096, "windows_on_request": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    moe: ExpertSizes
    shared_mlp: int  # width of the expert that all tokens share

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        return cls(
            **sizes,
            qkv_bias=field_of(hf, "qkv_bias", bool, default=True),
            windows=_windows(hf, sizes["layers"]),
            moe=expert_sizes(hf),
            shared_mlp=field_of(hf, "shared_expert_intermediate_size", int),
        )


def _windows(hf: Hf, layers: int) -> tuple[int | None, ...]:
    """Every second one of the lower layers has a window, if use_sliding_window."""
    if not field_of(hf, "use_sliding_window", bool, default=False):
        return ()
    window = field_of(hf, "sliding_window", int, default=4096)
    last = field_of(hf, "max_window_layers", int, default=28)
    kinds = [SLIDING if i % 2 == 0 and i < last else FULL for i in range(layers)]
    return windows_of(hf, window, kinds)


class SparseMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        routing = RoutingMethod(c.moe.top_k, renormalise=c.moe.renormalise)
        self.gate = Router(c.hidden, c.moe.experts, routing)
        self.experts = Experts(
            c.hidden, c.moe.mlp, c.moe.experts, ExpertActivation(ACTIVATION_KINDS[c.act])
        )
        self.shared_expert = GatedMLP(c.hidden, c.shared_mlp, c.act)
        self.shared_expert_gate = Linear(c.hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts(x, *self.gate(x))
        return gated_add(chosen, self.shared_expert(x), self.shared_expert_gate(x))


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(i))
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
