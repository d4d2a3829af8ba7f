"""Gemma-3 as published with a vision tower: the text half of it. Images are not supported.

The checkpoint nests the text model, under one name or another by the age of the file.

Source: model_type "gemma3", https://huggingface.co/google/gemma-3-4b-it
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import gemma3_text
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "windows": "periodic",
    "window": 4096,
    "period": 6,
    "tied": True,
    "scaling_extends": False,
    "defaults": {"rope_local_base_freq": 10000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(gemma3_text.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> gemma3_text.Config:
        text = field_of(hf, "text_config", dict)
        outer = {key: hf.get(key) for key in ("dtype", "torch_dtype", "tie_word_embeddings")}
        given = {key: value for key, value in outer.items() if value is not None}
        return gemma3_text.Config.from_hf({**text, **given})


class Model(gemma3_text.Model):
    weights = Weights(
        strip=("model.language_model.", "language_model.model.", "language_model."),
        fuse=gemma3_text.Model.weights.fuse,
        ignore=(
            "*.rotary_emb.inv_freq",
            "*vision_tower.*",
            "*multi_modal_projector.*",
        ),
        tie={"lm_head": "embed_tokens"},
    )
