"""BART: learned positions and a norm of the embeddings, norms after each part, biases everywhere.

Source: model_type "bart", https://huggingface.co/facebook/bart-large; transformers modeling_bart.py
"""

from __future__ import annotations

from torch import nn

from quire.layers import LayerNorm, PositionEmbedding
from quire.models._encoder_decoder import PostNormConfig, PostNormModel

UNUSED_POSITIONS = 2  # the first rows of the position tables, left over from padding

CONVENTIONS = {"mlp_kind": "plain", "positions_kind": "learned", "tied": True}


class Config(PostNormConfig):
    pass


class Model(PostNormModel):
    @staticmethod
    def build_positions(c: PostNormConfig) -> nn.Module:
        return PositionEmbedding(c.positions, c.hidden, skip=UNUSED_POSITIONS)

    @staticmethod
    def build_embedding_norm(c: PostNormConfig) -> nn.Module:
        return LayerNorm(c.hidden, c.norm_eps)
