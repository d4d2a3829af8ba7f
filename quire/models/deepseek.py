"""DeepSeek-MoE: Llama's attention, and from some layer on a choice of experts beside shared ones.

Source: model_type "deepseek", https://huggingface.co/deepseek-ai/deepseek-moe-16b-chat; a
"deepseek_v2" with use_mla: false is one too, as in DeepSeek-VL2-tiny
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.layers import AddRMSNorm
from quire.models import llama
from quire.models._decoder import PreNormLayer
from quire.models._experts import RoutedSizes, mlp_of_layer, routed_sizes
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of
from quire.models.deepseek_v2 import routing_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    moe: RoutedSizes

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        moe = routed_sizes(hf, routing_of(hf))
        return cls(**rotary_sizes_of(hf), qkv_bias=bias, o_bias=bias, moe=moe)


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(i))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = mlp_of_layer(c, c.moe, i)


class Model(llama.Model):
    layer_class = Layer
    weights = replace(
        llama.Model.weights,
        experts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    )
