"""Jina embeddings v3: XLM-RoBERTa with rotary positions, without the adapters of its tasks.

Checkpoints of Jina have the model type "xlm-roberta", names of flash attention, and each weight
beside its adapters.

Source: model_type "jina_embeddings_v3", https://huggingface.co/jinaai/jina-embeddings-v3;
transformers modeling_jina_embeddings_v3.py
"""

from __future__ import annotations

from quire.models._rotary_encoder import RotaryEncoder, RotaryEncoderConfig, rotary_encoder_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {"mlp_kind": "plain", "tied": True, "bidirectional": True}


class Config(RotaryEncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        theta = field_of(hf, "rotary_emb_base", float, default=20_000.0)
        sizes = rotary_encoder_sizes({"type_vocab_size": 1, **hf}, eps=1e-5, theta=theta)
        return cls(**sizes, gated=False, up_bias=True)


class Model(RotaryEncoder):
    lm_act = "gelu"
    weights = Weights(
        strip=("roberta.",),
        paths={
            "parametrizations.weight": "",
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.token_type_embeddings": "embed_positions",
            "embeddings.LayerNorm": "embed_norm",
            "emb_ln": "embed_norm",
            "encoder.layers": "layers",
            "mixer": "self_attn",
            "self_attn.Wqkv": "self_attn.qkv_proj",
            "self_attn.o_proj": "self_attn.out_proj",
            "norm1": "self_attn_layer_norm",
            "post_attention_layernorm": "self_attn_layer_norm",
            "norm2": "final_layer_norm",
            "post_mlp_layernorm": "final_layer_norm",
            "mlp.fc1": "mlp.gate_up_proj",
            "mlp.fc2": "mlp.down_proj",
            "classifier.dense": "head.dense",
            "classifier.out_proj": "head.out_proj",
            "classifier": "head.out_proj",  # of tokens
            "lm_head.dense": "lm_transform.dense",
            "lm_head.layer_norm": "lm_transform.norm",
            "lm_head.decoder": "lm_head",
        },
        alias={"lm_head.bias": "lm_bias.bias"},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.lora_A", "*.lora_B", "lm_head.decoder.bias", "*embeddings.position_ids"),
        tie={"lm_head": "embed_tokens"},
    )
