"""GLM-4.5 to 4.7: Llama's attention on half of each head, DeepSeek-V3's experts.

A norm on every query and key head, if `use_qk_norm`. The layers after the last, which predict
further tokens (MTP), are left in the checkpoint.

Source: model_type "glm4_moe", https://huggingface.co/zai-org/GLM-4.5; transformers
        modeling_glm4_moe.py
Axes:   T tokens in the step, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.layers import AddRMSNorm, Attention, QKVLinear, RMSNorm, Rope, RopeConfig, RowLinear
from quire.models import deepseek_v2
from quire.models._decoder import Decoder, GatedMLP, PreNormLayer
from quire.models._experts import RoutedConfig, RoutedMLP, routed_sizes, sigmoid_routing
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of

CONVENTIONS = {
    "defaults": {
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RoutedConfig):
    rope: RopeConfig
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(
            **rotary_sizes_of(hf),
            **routed_sizes(hf),
            routing=sigmoid_routing(hf),
            correction=True,
            spare_layers=field_of(hf, "num_nextn_predict_layers", int, default=1),
            qkv_bias=field_of(hf, "attention_bias", bool, default=False),
            qk_norm=field_of(hf, "use_qk_norm", bool, default=False),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, step.positions)
        return self.o_proj(self.attn(q, k, v, step.attention))


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = RoutedMLP(c) if i >= c.dense else GatedMLP(c.hidden, c.mlp, c.act)


class Model(Decoder):
    layer_class = Layer
    weights = replace(
        deepseek_v2.Model.weights,
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.weights = replace(self.weights, absent=c.spare_names)
