"""Marian: as BART, with computed positions and without a norm of the embeddings.

Source: model_type "marian", https://huggingface.co/Helsinki-NLP/opus-mt-en-de; transformers
        modeling_marian.py
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.layers import SinusoidalEmbedding
from quire.models._encoder_decoder import PostNormConfig, PostNormModel
from quire.models.base import Hf, field_of

CONVENTIONS = {"mlp_kind": "plain", "positions_kind": "computed", "tied": True}


class Config(PostNormConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "share_encoder_decoder_embeddings", bool, default=True, one_of={True})
        return super().from_hf(hf)


class Model(PostNormModel):
    weights = replace(
        PostNormModel.weights, ignore=(*PostNormModel.weights.ignore, "*.embed_positions.weight")
    )

    @staticmethod
    def build_positions(c: PostNormConfig) -> nn.Module:
        return SinusoidalEmbedding(c.positions, c.hidden)
