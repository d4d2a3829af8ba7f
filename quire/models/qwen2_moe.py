"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with a choice of experts beside one that all tokens share.

Source: model_type "qwen2_moe", https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B; transformers
        modeling_qwen2_moe.py
Axes:   T tokens in the step, E hidden, F width of an expert, X experts, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    Embedding,
    ExpertActivation,
    Experts,
    Linear,
    LMHead,
    Router,
    RoutingMethod,
    gated_add,
)
from quire.models import llama
from quire.models._experts import ExpertSizes, expert_sizes
from quire.models._rope import rope_of, scaled_max_len
from quire.models._windows import FULL, SLIDING, windows_of
from quire.models.base import Hf, StepInputs, Weights, field_of, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    moe: ExpertSizes
    shared_mlp: int  # width of the expert that all tokens share

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = sizes_of(hf)
        return cls(
            **{**sizes, "max_len": scaled_max_len(hf)},
            rope=rope_of(hf, sizes["head_dim"]),
            qkv_bias=field_of(hf, "qkv_bias", bool, default=True),
            windows=_windows(hf, sizes["layers"]),
            moe=expert_sizes(hf),
            shared_mlp=field_of(hf, "shared_expert_intermediate_size", int),
        )


def _windows(hf: Hf, layers: int) -> tuple[int | None, ...]:
    """Every other one of the lower layers slides a window, if use_sliding_window."""
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
        self.shared_expert = llama.MLP(replace(c, mlp=c.shared_mlp))
        self.shared_expert_gate = Linear(c.hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts(x, *self.gate(x))
        return gated_add(chosen, self.shared_expert(x), self.shared_expert_gate(x))


class Layer(nn.Module):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(i))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = SparseMLP(c) if c.moe.is_sparse(i) else llama.MLP(c)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        x = self.self_attn(x, step)
        x, res = self.post_attention_layernorm(x, res)
        return self.mlp(x), res


class Model(nn.Module):
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.lm_head = LMHead(c.vocab, c.hidden)

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states of every token in the step: [T, E]."""
        x, res = self.embed_tokens(step.token_ids), None
        for layer in self.layers:
            x, res = layer(x, res, step)
        return self.norm(x, res)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, V] for the rows that are sampled."""
        return self.lm_head(hidden)
