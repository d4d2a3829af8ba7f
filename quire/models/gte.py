"""GTE v1.5 and multilingual: BERT with rotary positions and a gated MLP.

Checkpoints of Alibaba call the type "new" and have prefixes of their own.

Source: model_type "gte", https://huggingface.co/Alibaba-NLP/gte-multilingual-base; transformers
modeling_gte.py
"""

from __future__ import annotations

from quire.models._rotary_encoder import RotaryEncoder, RotaryEncoderConfig, rotary_encoder_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {"tied": True, "bidirectional": True}


class Config(RotaryEncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "position_embedding_type", str, default="rope", one_of={"rope"})
        field_of(hf, "layer_norm_type", str, default="layer_norm", one_of={"layer_norm"})
        for name in ("logn_attention_scale", "logn_attention_clip1"):
            field_of(hf, name, bool, default=False, one_of={False})
        return cls(**rotary_encoder_sizes(hf, theta=160_000.0))


class Model(RotaryEncoder):
    lm_act = "gelu"
    weights = Weights(
        strip=("gte.", "new."),
        paths={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.token_type_embeddings": "embed_positions",
            "embeddings.LayerNorm": "embed_norm",
            "encoder.layer": "layers",
            "attention": "self_attn",
            "self_attn.o_proj": "self_attn.out_proj",
            "attn_ln": "self_attn_layer_norm",
            "post_attention_layernorm": "self_attn_layer_norm",
            "mlp_ln": "final_layer_norm",
            "post_mlp_layernorm": "final_layer_norm",
            "mlp.up_gate_proj": "mlp.gate_up_proj",
            "pooler.dense": "head.dense",
            "classifier": "head.out_proj",
            "lm_head.dense": "lm_transform.dense",
            "lm_head.layer_norm": "lm_transform.norm",
            "lm_head.norm": "lm_transform.norm",
            "lm_head.decoder": "lm_head",
        },
        alias={"lm_head.decoder.bias": "lm_bias.bias"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=("*embeddings.position_ids", "*rotary_emb.inv_freq"),
        tie={"lm_head": "embed_tokens"},
    )
