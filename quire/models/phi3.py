"""Phi-3 and Phi-3.5: Llama stored with q, k, v in one tensor and gate, up in another.

Source: model_type "phi3", https://huggingface.co/microsoft; transformers modeling_phi3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_uniform_windows
from quire.models.base import Hf, Weights, field_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        hf = _with_longrope({"original_max_position_embeddings": 4096, **hf})
        sizes = rotary_sizes_of(hf)
        return cls(
            **sizes,
            windows=read_uniform_windows(hf, sizes["layers"]),
        )


def _with_longrope(hf: Hf) -> Hf:
    """The first Phi-3 files called "yarn" what later ones call "longrope"."""
    scaling = field_of(hf, "rope_scaling", dict, default={})
    if scaling.get("type") != "yarn":
        return hf
    return {**hf, "rope_scaling": {**scaling, "type": "longrope"}}


class Model(llama.Model):
    weights = Weights(
        strip=("model.",),
        ignore=("*.rotary_emb.inv_freq",),
        tie={"lm_head": "embed_tokens"},
    )
