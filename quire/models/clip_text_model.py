"""CLIP, its text half: a causal transformer whose last state is projected to an embedding.

An image of a prompt is one token, whose result is the embedding that the image encoder made of it
(quire.models.multimodal.clip).

Source: model_type "clip", https://huggingface.co/openai/clip-vit-base-patch32; transformers
        modeling_clip.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.models._dual_encoder import DualEncoderText, ProjectedConfig
from quire.models._plain import plain_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "embedding_field": "projection_dim",
    "ends_prompts": True,
    "nested_defaults": {
        "projection_dim": 512,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "vocab_size": 49_408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "eos_token_id": 49_407,
    },
}
TEXT_NAMES = {
    "embeddings.token_embedding": "embed_tokens",
    "embeddings.position_embedding": "embed_positions",
    "encoder.layers": "layers",
    "final_layer_norm": "norm",
    "layer_norm1": "norm_1",
    "layer_norm2": "norm_2",
    "self_attn": "attn",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
"""Paths in checkpoints -> ours."""


def text_weights(projection: str) -> Weights:
    """Return the names in a checkpoint. projection: of the last matrix."""
    return Weights(
        strip=("text_model.",),
        paths={projection: "projection", **TEXT_NAMES},
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("logit_scale", "logit_bias", "*.position_ids"),
    )


def text_sizes(hf: Hf) -> dict[str, Any]:
    """Return the fields of ProjectedConfig but those of the projection."""
    sizes = plain_sizes(hf, tied=False)
    return {**sizes, "positions": sizes["max_len"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ProjectedConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**text_sizes(hf), projection=field_of(hf, "projection_dim", int))


class Model(DualEncoderText):
    weights = text_weights("text_projection")
