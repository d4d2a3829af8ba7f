"""BLIP's text decoder: BERT with causal attention, and attention to the states of an image.

Source: model_type "blip_text_model", https://huggingface.co/Salesforce/blip-image-captioning-base;
        transformers modeling_blip_text.py
Axes:   T positions of all images, E hidden, R rows that are sampled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, LogitsBias, PositionEmbedding
from quire.models._encoder import LMTransform
from quire.models._encoder_decoder import PostNormConfig, PostNormModel
from quire.models.base import EncodesMedia, Hf, SourceInputs, Weights, field_of, sizes_of
from quire.models.bert import LAYERS, LM_HEAD

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "source": "image",
    "names": {"sep_token_id": "eos_token_id"},
    "defaults": {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "nested_defaults": {
        "is_encoder_decoder": True,
        "vocab_size": 30_524,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 30_522,
        "eos_token_id": 102,
        "encoder_layers": 0,
    },
}


CAPTIONS = "BlipForConditionalGeneration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PostNormConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes: dict[str, Any] = sizes_of(
            {**hf, "rms_norm_eps": field_of(hf, "layer_norm_eps", float)}, tied=True
        )
        for name in hf.get("wrapper_architectures") or (CAPTIONS,):
            if name != CAPTIONS:
                raise ConfigError(
                    f"config.json: architectures has {name!r:.80}; of BLIP, {CAPTIONS} is served"
                )
        vision = (hf.get("wrapper_config") or {}).get("vision_config") or {}
        return cls(
            **sizes,
            encoder_layers=0,
            encoder_heads=0,
            encoder_mlp=0,
            source_hidden=field_of(vision, "hidden_size", int, default=768),
            positions=sizes["max_len"],
        )


class Model(PostNormModel):
    weights = Weights(
        strip=("text_decoder.bert.", "text_decoder."),
        paths={
            "embeddings.word_embeddings": "embed_tokens",
            "embeddings.position_embeddings": "embed_positions",
            "embeddings.LayerNorm": "layernorm_embedding",
            "crossattention.self.query": "encoder_attn.q_proj",
            "crossattention.self": "encoder_attn",
            "crossattention.output.dense": "encoder_attn.out_proj",
            "crossattention.output.LayerNorm": "encoder_attn_layer_norm",
            **LAYERS,
            **LM_HEAD,
        },
        fuse={
            "qkv_proj": ("query", "key", "value"),
            "encoder_attn.kv_proj": ("key", "value"),
        },
        ignore=("*embeddings.position_ids", "*cls.predictions.decoder.bias"),
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        if c.media is None:
            raise ConfigError(
                "BLIP's text decoder attends to an image: serve the whole checkpoint, without "
                "language_model_only"
            )
        super().__init__(c)
        self.final_logits_bias = None
        self.source_hidden = c.source_hidden or c.hidden
        self.lm_bias = LogitsBias(self.lm_head)
        self.lm_transform = LMTransform(c.hidden, c.hidden, c.act, c.norm_eps)

    @staticmethod
    def build_positions(c: PostNormConfig) -> nn.Module:
        return PositionEmbedding(c.positions, c.hidden)

    @staticmethod
    def build_embedding_norm(c: PostNormConfig) -> nn.Module:
        return LayerNorm(c.hidden, c.norm_eps)

    def build_encoder(self, c: PostNormConfig) -> nn.Module:
        return nn.Identity()

    def encode_source(self, source: SourceInputs) -> Tensor:
        """The states of images [T, E of the tower]; zeros of sources without, as a start has."""
        encoder = cast(EncodesMedia, self.media_encoder)
        vectors = self.embed_tokens(source.token_ids)
        lazy_fusion.flush()
        hidden = vectors.new_zeros(len(vectors), self.source_hidden)
        if source.media:
            hidden[source.media_rows] = torch.cat(encoder.encode(source.media))
        return hidden

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        return super().logits(self.lm_transform(hidden), whole=whole)
