"""InternLM2: Llama with q, k and v as one matrix, and names of its own. Its reward models too.

Source: model_type "internlm2", https://huggingface.co/internlm/internlm2-chat-7b, whose Python code
is in the checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import QKVLinear
from quire.models import llama
from quire.models._plain import grouped_head_order
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, Weights, field_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "bias", bool, default=False)
        return cls(**rotary_sizes_of(hf), qkv_bias=bias, o_bias=bias)


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: llama.Config, window: int | None) -> None:
        super().__init__(c, window)
        order = grouped_head_order(c.heads, c.kv_heads)
        self.qkv_proj = QKVLinear(
            c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias, head_order=order
        )


class Layer(llama.Layer):
    attention_class = SelfAttention


class Model(llama.Model):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        rename={
            "tok_embeddings": "embed_tokens",
            "attention": "self_attn",
            "wqkv": "qkv_proj",
            "wo": "o_proj",
            "feed_forward": "mlp",
            "w2": "down_proj",
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "output": "lm_head",
        },
        fuse={"gate_up_proj": ("w1", "w3")},
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
