"""SigLIP, its text half: a bidirectional transformer over a text that is padded to 64 tokens.

Tokens attend to the padding too. The state of the last position is projected to an embedding.

Source: model_type "siglip", https://huggingface.co/google/siglip-so400m-patch14-384; transformers
        modeling_siglip.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._dual_encoder import DualEncoderText, ProjectedConfig
from quire.models.base import Hf, field_of
from quire.models.clip_text_model import text_sizes, text_weights

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "bidirectional": True,
    "embedding_state": "last",
    "embedding_field": "projection_size",
    "pads_prompts": True,
    "nested_defaults": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ProjectedConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = text_sizes(hf)
        return cls(
            **sizes,
            bidirectional=True,
            projection=field_of(hf, "projection_size", int, default=sizes["hidden"]),
            projection_bias=True,
        )


class Model(DualEncoderText):
    weights = text_weights("head")
