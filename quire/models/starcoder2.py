"""StarCoder2: rotary positions, LayerNorm, an ungated MLP, few KV heads, and maybe a window.

Source: model_type "starcoder2", https://huggingface.co/bigcode/starcoder2-7b; transformers
        modeling_starcoder2.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._plain import PlainConfig, PlainDecoder, plain_rotary_sizes
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "tied": True,
    "defaults": {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = plain_rotary_sizes(hf)
        bias = field_of(hf, "use_bias", bool, default=True)
        windows = read_uniform_windows(hf, sizes["layers"])
        return cls(**sizes, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


class Model(PlainDecoder):
    weights = Weights(
        strip=("model.",),
        rename={
            "input_layernorm": "norm_1",
            "self_attn": "attn",
            "o_proj": "out_proj",
            "post_attention_layernorm": "norm_2",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
