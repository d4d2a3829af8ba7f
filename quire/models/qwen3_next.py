"""Qwen3-Next: three gated delta nets to each layer of gated attention, and many small experts.

Source: model_type "qwen3_next", https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct;
        transformers modeling_qwen3_next.py
Axes:   T tokens in the step, E hidden, H query heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.config.recurrent_layers import RECURRENT
from quire.kernels.output_gate import output_gate
from quire.layers import AddRMSNorm, Attention, QKVLinear, RMSNorm, Rope, RowLinear
from quire.layers.recurrent import DeltaNetSizes, GatedDeltaNet
from quire.models import qwen2_moe
from quire.models._decoder import Decoder, GatedMLP
from quire.models._experts import expert_sizes
from quire.models._recurrent import recurrent_fields, states_of
from quire.models._rope import rotary_sizes_of
from quire.models.base import CarriedStates, Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "recurrent": "gated_delta_net",
    "recurrent_layers": "interval",
    "mtp_layers": 1,
    "defaults": {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(qwen2_moe.Config):
    delta: DeltaNetSizes
    by_head: bool = True  # projections of the delta nets are in the order of key heads

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **rotary_sizes_of(hf),
            **recurrent_fields(hf),
            qkv_bias=bias,
            o_bias=bias,
            norm_offset=1.0,
            moe=expert_sizes(hf),
            shared_mlp=field_of(hf, "shared_expert_intermediate_size", int),
            delta=delta_sizes(hf),
        )


def delta_sizes(hf: Hf) -> DeltaNetSizes:
    """The settings of the gated delta nets."""
    return DeltaNetSizes(
        key_heads=field_of(hf, "linear_num_key_heads", int),
        value_heads=field_of(hf, "linear_num_value_heads", int),
        key_dim=field_of(hf, "linear_key_head_dim", int),
        value_dim=field_of(hf, "linear_value_head_dim", int),
        kernel=field_of(hf, "linear_conv_kernel_dim", int),
        eps=field_of(hf, "rms_norm_eps", float, default=1e-6),
    )


class GatedAttention(nn.Module):
    """Each query head has a gate for its output: twice as many heads come of the projection."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias, gates=True)
        self.o_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, offset=c.norm_offset)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, offset=c.norm_offset)
        self.rope = Rope(c.rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        both, k, v = self.qkv_proj(x)
        both = both.view(len(x), -1, 2, both.shape[-1])
        q, gate = both[:, :, 0], both[:, :, 1]  # [T, H, D]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), step.positions)
        return self.o_proj(output_gate(self.attn(q, k, v, step.attention), gate))


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=c.norm_offset)
        self.linear_attn = self.self_attn = None
        if c.kinds[layer] == RECURRENT:
            self.linear_attn = GatedDeltaNet(c.hidden, c.delta, by_head=c.by_head)
        else:
            self.self_attn = GatedAttention(c)
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps, offset=c.norm_offset)
        self.mlp = self.build_mlp(c, layer)

    def build_mlp(self, c: Config, layer: int) -> nn.Module:
        """The MLP, or the experts."""
        if c.moe.is_sparse(layer):
            return qwen2_moe.SparseMLP(c)
        return GatedMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.input_layernorm(x, res)
        if self.linear_attn is not None:
            x = self.linear_attn(x, states_of(step))
        elif self.self_attn is not None:
            x = self.self_attn(x, step)
        x, res = self.post_attention_layernorm(x, res)
        return self.mlp(x), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
        ignore=("*.rotary_emb.inv_freq", "mtp.*"),
        tie={"lm_head": "embed_tokens"},
    )
