"""GLM-4.5 to 4.7: Llama's attention on half of each head, DeepSeek-V3's experts.

A norm on every query and key head, if `use_qk_norm`. The layers after the last, which predict
further tokens (MTP), are left in the checkpoint.

Source: model_type "glm4_moe", https://huggingface.co/zai-org/GLM-4.5; transformers
        modeling_glm4_moe.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.layers import AddRMSNorm
from quire.models import deepseek_v2, llama, qwen3
from quire.models._decoder import Decoder, PreNormLayer, spare_names
from quire.models._experts import RoutedSizes, mlp_of_layer, routed_sizes, sigmoid_routing
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "defaults": {
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    moe: RoutedSizes
    spare_layers: int
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(
            **rotary_sizes_of(hf),
            qkv_bias=field_of(hf, "attention_bias", bool, default=False),
            moe=routed_sizes(hf, sigmoid_routing(hf), correction=True),
            spare_layers=field_of(hf, "num_nextn_predict_layers", int),
            qk_norm=field_of(hf, "use_qk_norm", bool, default=False),
        )


class Layer(PreNormLayer):
    def __init__(self, c: Config, i: int) -> None:
        super().__init__()
        attention = qwen3.SelfAttention if c.qk_norm else llama.SelfAttention
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.self_attn = attention(c, c.window(i))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = mlp_of_layer(c, c.moe, i)


class Model(Decoder):
    layer_class = Layer
    weights = replace(deepseek_v2.Model.weights, fuse=llama.Model.weights.fuse)

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.weights = replace(self.weights, absent=spare_names(c.layers, c.spare_layers))
