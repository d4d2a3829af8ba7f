"""RoBERTa: BERT whose positions start after the padding token's, with heads of its own.

XLM-RoBERTa and CamemBERT have the same layers and tensors.

Source: model_type "roberta", https://huggingface.co/FacebookAI/roberta-base; transformers
modeling_roberta.py
"""

from __future__ import annotations

from quire.models._encoder import Encoder, EncoderConfig, encoder_sizes
from quire.models.base import Hf, Weights, field_of
from quire.models.bert import EMBEDDINGS, FUSED, LAYERS

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "positions_after_padding": True,
    "tied": True,
    "bidirectional": True,
    "defaults": {"type_vocab_size": 2},
}

FLASH = {
    "emb_ln": "embed_norm",
    "encoder.layers": "layers",
    "mixer.Wqkv": "self_attn.qkv_proj",
    "mixer.out_proj": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
    "norm2": "final_layer_norm",
}
"""Names of implementations with flash attention, as jina-reranker-v2 has."""
HEADS = {
    "classifier.dense": "head.dense",
    "classifier.out_proj": "head.out_proj",
    "lm_head.dense": "lm_transform.dense",
    "lm_head.layer_norm": "lm_transform.norm",
    "lm_head.decoder": "lm_head",
}


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        types = (field_of(hf, "type_vocab_size", int),)
        return cls(**encoder_sizes(hf, offset=True), types=types)


class Model(Encoder):
    lm_act = "gelu"
    weights = Weights(
        strip=("roberta.",),
        paths={**FLASH, **EMBEDDINGS, **LAYERS, **HEADS},
        alias={"lm_head.bias": "lm_bias.bias"},
        fuse=FUSED,
        ignore=("*embeddings.position_ids", "*embeddings.token_type_ids", "lm_head.decoder.bias"),
        tie={"lm_head": "embed_tokens"},
    )
