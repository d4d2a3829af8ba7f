"""mT5: T5 1.1 with a larger vocabulary; its outputs are never scaled.

Source: model_type "mt5", https://huggingface.co/google/mt5-small; transformers modeling_mt5.py
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import t5
from quire.models.base import Hf
from quire.models.t5 import Model as Model

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "relative",
    "tied": True,
    "fits_float16": False,
}


class Config(t5.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> t5.Config:
        defaults = {"feed_forward_proj": "gated-gelu"}
        return replace(super().from_hf({**defaults, **hf}), logit_scale=1.0)
