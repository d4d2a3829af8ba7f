"""LFM2: short gated convolutions, and attention in some layers.

Source: model_type "lfm2", https://huggingface.co/LiquidAI/LFM2-1.2B; transformers modeling_lfm2.py
Axes:   T tokens in the step, E hidden, F mlp width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.config.recurrent_layers import RECURRENT, mlp_width
from quire.layers import AddRMSNorm, RMSNorm
from quire.layers.recurrent import ShortConv
from quire.models import llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._recurrent import recurrent_fields, states_of
from quire.models._rope import rotary_sizes_of
from quire.models.base import CarriedStates, Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "recurrent": "short_conv",
    "recurrent_layers": "indices",
    "tied": True,
    "defaults": {"conv_L_cache": 3, "max_position_embeddings": 128_000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    conv_width: int
    conv_bias: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**sizes_of(hf))


def sizes_of(hf: Hf) -> dict[str, Any]:
    """The fields of Config."""
    eps = field_of(hf, "norm_eps", float, default=1e-5)
    wide = field_of(hf, "intermediate_size", int, default=12288)
    named = {
        **hf,
        "rms_norm_eps": eps,
        "intermediate_size": mlp_width(hf, wide),
        "tie_word_embeddings": hf.get("tie_embedding", hf.get("tie_word_embeddings")),
    }
    return {
        **rotary_sizes_of(named, tied=True, theta=1e6),
        **recurrent_fields(hf),
        "conv_width": field_of(hf, "conv_L_cache", int),
        "conv_bias": field_of(hf, "conv_bias", bool, default=False),
    }


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config) -> None:
        super().__init__(c, None)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.operator_norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.conv = self.self_attn = None
        if c.kinds[layer] == RECURRENT:
            self.conv = ShortConv(c.hidden, c.conv_width, bias=c.conv_bias)
        else:
            self.self_attn = SelfAttention(c)
        self.ffn_norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.feed_forward = self.make_mlp(c, layer)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return GatedMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.operator_norm(x, res)
        if self.conv is not None:
            x = self.conv(x, states_of(step))
        elif self.self_attn is not None:
            x = self.self_attn(x, step)
        x, res = self.ffn_norm(x, res)
        return self.feed_forward(x), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        rename={
            "embedding_norm": "norm",
            "self_attn.out_proj": "o_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
            "feed_forward.w2": "down_proj",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
