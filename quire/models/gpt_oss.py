"""GPT-OSS: experts with a clamped gate, a learned sink in every head, windows in every other layer.

A head's sink is one more score in its softmax, without a key. Biases are everywhere but in the
norms and the head.

Source: model_type "gpt_oss", https://huggingface.co/openai/gpt-oss-20b; transformers
        modeling_gpt_oss.py
Axes:   T tokens in the step, E hidden, F width of an expert, X experts, H query heads, K kv heads,
        D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.distributed.mesh import head_range
from quire.layers import (
    AddRMSNorm,
    Attention,
    ExpertActivation,
    Experts,
    ParamModule,
    QKVLinear,
    Rope,
    RopeConfig,
    Router,
    RoutingMethod,
    RowLinear,
)
from quire.models._decoder import Decoder, PreNormLayer
from quire.models._experts import expert_counts
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_periodic_windows
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, field_of
from quire.weights.mapping import InitSpec, WeightShard

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
CONVENTIONS = {
    "windows": "periodic",
    "window": 128,
    "period": 2,
    "defaults": {"head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig
    bias: bool
    experts: int
    top_k: int
    gate: ExpertActivation

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "is_causal", bool, default=True, one_of={True})  # sinks have no kernel
        field_of(hf, "hidden_act", str, default="silu", one_of={"silu"})
        if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
            hf = {**hf, "rope_scaling": YARN}
        sizes = rotary_sizes_of(hf, theta=150_000.0)
        experts, top_k = expert_counts(hf)
        alpha = field_of(hf, "swiglu_alpha", float, default=1.702)
        return cls(
            **sizes,
            windows=read_periodic_windows(hf, sizes["layers"], window=128, period=2),
            bias=field_of(hf, "attention_bias", bool, default=True),
            experts=experts,
            top_k=top_k,
            gate=ExpertActivation(
                "clamped", alpha, field_of(hf, "swiglu_limit", float, default=7.0)
            ),
        )


class SelfAttention(ParamModule):
    """Owns the sinks, under the name that checkpoints give them; its Attention reads them."""

    sinks: Tensor

    def __init__(self, c: Config, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads = c.heads, c.kv_heads
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.bias)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, window=window)
        self.declare("sinks")

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        q, k = self.rope(q, k, step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return (WeightShard((self.heads,), (head_range(self.heads, self.kv_heads, self.mesh),)),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 1.0)

    def set_param(self, param: str, value: object) -> None:
        super().set_param(param, value)
        self.attn.sinks = self.sinks.detach()


class SparseMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        routing = RoutingMethod(c.top_k, renormalise=True)
        self.router = Router(c.hidden, c.experts, routing, bias=True)
        self.experts = Experts(
            c.hidden, c.mlp, c.experts, c.gate, bias=True, turned=True, interleaved=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.router(x))


class Layer(PreNormLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.window(layer))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = SparseMLP(c)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        tie={"lm_head": "embed_tokens"},
    )
