"""MPNet: RoBERTa without token types, and a bias of scores by distance, which all layers share.

Source: model_type "mpnet", https://huggingface.co/microsoft/mpnet-base; transformers
modeling_mpnet.py
"""

from __future__ import annotations

from torch import nn

from quire.layers import RelativeBias
from quire.models._encoder import Encoder, EncoderConfig, EncoderLayer, encoder_sizes
from quire.models.base import Hf, ModelConfig, Weights, field_of
from quire.models.bert import EMBEDDINGS, LAYERS
from quire.models.roberta import HEADS

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "positions_after_padding": True,
    "tied": True,
    "bidirectional": True,
}

BUCKETS, MAX_DISTANCE = 32, 128  # transformers computes with these whatever config.json says
PADDING = 1  # this token's position is the last unused one, whatever config.json says


class Config(EncoderConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "relative_attention_num_buckets", int, default=BUCKETS, one_of={BUCKETS})
        return cls(**encoder_sizes({**hf, "pad_token_id": PADDING}, offset=True))


class Model(Encoder):
    lm_act = "gelu"
    weights = Weights(
        strip=("mpnet.",),
        paths={
            **EMBEDDINGS,
            **LAYERS,
            **HEADS,
            "position_embeddings": "embed_positions",
            "encoder.relative_attention_bias": "relative_attention_bias",
            "attention.attn.o": "self_attn.out_proj",
            "attention.attn": "self_attn",
            "attention.LayerNorm": "self_attn_layer_norm",
        },
        alias={"lm_head.bias": "lm_bias.bias"},
        fuse={"qkv_proj": ("q", "k", "v")},
        ignore=("*embeddings.position_ids", "lm_head.decoder.bias"),
        tie={"lm_head": "embed_tokens"},
    )

    def build_layers(self, c: ModelConfig) -> nn.ModuleList:
        """All layers, in order."""
        bias = RelativeBias(BUCKETS, MAX_DISTANCE, c.heads, bidirectional=True)
        self.relative_attention_bias = bias
        return nn.ModuleList(EncoderLayer(c, i, bias) for i in range(c.layers))
