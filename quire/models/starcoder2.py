"""StarCoder2: Llama's attention with LayerNorm and an ungated MLP, biases everywhere.

Source: model_type "starcoder2", https://huggingface.co/bigcode/starcoder2-7b; transformers
        modeling_starcoder2.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import AddLayerNorm
from quire.models import llama
from quire.models._decoder import Decoder, PlainMLP, PreNormLayer
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "tied": True,
    "defaults": {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf, tied=True)
        bias = field_of(hf, "use_bias", bool, default=True)
        return cls(
            **{**sizes, "norm_eps": field_of(hf, "norm_epsilon", float, default=1e-5)},
            windows=read_uniform_windows(hf, sizes["layers"]),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
        )


class Layer(PreNormLayer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddLayerNorm(c.hidden, c.norm_eps)
        self.self_attn = llama.SelfAttention(c, c.window(layer))
        self.post_attention_layernorm = AddLayerNorm(c.hidden, c.norm_eps)
        self.mlp = PlainMLP(c.hidden, c.mlp, c.act, c.mlp_bias)


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps)
