"""DistilBERT: BERT without token types, under names of its own.

Source: model_type "distilbert", https://huggingface.co/distilbert/distilbert-base-uncased;
transformers modeling_distilbert.py
"""

from __future__ import annotations

from quire.models._encoder import Encoder, EncoderConfig, encoder_sizes
from quire.models.base import Hf, Weights
from quire.models.bert import EMBEDDINGS

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "bidirectional": True,
}


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        fixed = {"layer_norm_eps": 1e-12}  # not in config.json
        sizes = encoder_sizes(
            {**hf, **fixed},
            hidden="dim",
            layers="n_layers",
            heads="n_heads",
            mlp="hidden_dim",
            act="activation",
        )
        return cls(**sizes)


class Model(Encoder):
    head_act = "relu"
    weights = Weights(
        strip=("distilbert.",),
        paths={
            **EMBEDDINGS,
            "position_embeddings": "embed_positions",
            "transformer.layer": "layers",
            "attention.out_lin": "self_attn.out_proj",
            "attention": "self_attn",
            "sa_layer_norm": "self_attn_layer_norm",
            "ffn.lin1": "fc1",
            "ffn.lin2": "fc2",
            "output_layer_norm": "final_layer_norm",
            "pre_classifier": "head.dense",
            "classifier": "head.out_proj",
            "vocab_transform": "lm_transform.dense",
            "vocab_layer_norm": "lm_transform.norm",
            "vocab_projector": "lm_head",
        },
        alias={"vocab_projector.bias": "lm_bias.bias"},
        fuse={"qkv_proj": ("q_lin", "k_lin", "v_lin")},
        ignore=("*embeddings.position_ids",),
        tie={"lm_head": "embed_tokens"},
    )
