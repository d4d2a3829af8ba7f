"""ELECTRA: BERT with smaller embeddings, which are projected, and a head of its own.

Source: model_type "electra", https://huggingface.co/google/electra-small-discriminator;
transformers modeling_electra.py
"""

from __future__ import annotations

from quire.models._encoder import Encoder, EncoderConfig, encoder_sizes
from quire.models.base import Hf, Weights, field_of
from quire.models.bert import EMBEDDINGS, FUSED, LAYERS

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "bidirectional": True,
    "defaults": {"type_vocab_size": 2},
}


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        types = (field_of(hf, "type_vocab_size", int),)
        return cls(**encoder_sizes(hf, word_size="embedding_size"), types=types)


class Model(Encoder):
    head_act = lm_act = "gelu"
    weights = Weights(
        strip=("electra.",),
        paths={
            **EMBEDDINGS,
            **LAYERS,
            "embeddings_project": "project_in",
            "classifier.dense": "head.dense",
            "classifier.out_proj": "head.out_proj",
            "generator_predictions.dense": "lm_transform.dense",
            "generator_predictions.LayerNorm": "lm_transform.norm",
            "generator_lm_head": "lm_head",
        },
        alias={"generator_lm_head.bias": "lm_bias.bias"},
        fuse=FUSED,
        ignore=(
            "*embeddings.position_ids",
            "*embeddings.token_type_ids",
            "discriminator_predictions.*",
        ),
        tie={"lm_head": "embed_tokens"},
    )
