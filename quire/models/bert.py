"""BERT: learned positions and token types, norms after each part, biases everywhere.

The pooler of checkpoints is part of the head that classifies sequences; pooling does not use it.

Source: model_type "bert", https://huggingface.co/google-bert/bert-base-uncased; transformers
modeling_bert.py
"""

from __future__ import annotations

from quire.models._encoder import Encoder, EncoderConfig, encoder_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "bidirectional": True,
    "defaults": {"type_vocab_size": 2},
}

EMBEDDINGS = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.LayerNorm": "embed_norm",
    "embeddings": "",  # the tables of positions and types have names of their own
}
LAYERS = {
    "encoder.layer": "layers",
    "attention.self": "self_attn",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
LM_HEAD = {
    "cls.predictions.transform.dense": "lm_transform.dense",
    "cls.predictions.transform.LayerNorm": "lm_transform.norm",
    "cls.predictions.decoder": "lm_head",
    "cls.predictions": "lm_bias",
}
FUSED = {
    "qkv_proj": ("query", "key", "value"),
    "embed_positions": ("position_embeddings", "token_type_embeddings"),
}


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**encoder_sizes(hf), types=(field_of(hf, "type_vocab_size", int),))


class Model(Encoder):
    weights = Weights(
        strip=("bert.",),
        paths={
            **EMBEDDINGS,
            **LAYERS,
            **LM_HEAD,
            "pooler.dense": "head.dense",
            "classifier": "head.out_proj",
        },
        fuse=FUSED,
        ignore=(
            "*embeddings.position_ids",
            "*embeddings.token_type_ids",
            "cls.seq_relationship.*",
            "cls.predictions.decoder.bias",
        ),
        tie={"lm_head": "embed_tokens"},
    )
