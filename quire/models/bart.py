"""BART: learned positions and a norm of the embeddings, norms after each part, biases everywhere.

Source: model_type "bart", https://huggingface.co/facebook/bart-large; transformers modeling_bart.py
"""

from __future__ import annotations

from torch import nn

from quire.layers import LayerNorm, PositionEmbedding
from quire.models._encoder_decoder import PostNormConfig, PostNormModel

UNUSED_POSITIONS = 2  # the first rows of the position tables, left over from padding

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "nested_defaults": {
        "is_encoder_decoder": True,
        "vocab_size": 50_265,
        "d_model": 1024,
        "encoder_layers": 12,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_layers": 12,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
}


class Config(PostNormConfig):
    pass


class Model(PostNormModel):
    @staticmethod
    def build_positions(c: PostNormConfig) -> nn.Module:
        return PositionEmbedding(c.positions, c.hidden, skip=UNUSED_POSITIONS)

    @staticmethod
    def build_embedding_norm(c: PostNormConfig) -> nn.Module:
        return LayerNorm(c.hidden, c.norm_eps)
