"""Command R7B and Command A: Command R with windows in three of four layers, none of the others
rotated.

Source: model_type "cohere2", https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024;
        transformers modeling_cohere2.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import cohere
from quire.models._windows import read_periodic_windows
from quire.models.base import Hf, field_of

CONVENTIONS = {"windows": "periodic", "window": 4096, "period": 4, "tied": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(cohere.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "use_qk_norm", bool, default=False, one_of=(False,))
        fields = cohere.shared_fields({**hf, "head_dim": None})
        period = field_of(hf, "sliding_window_pattern", int, default=4)
        windows = read_periodic_windows(hf, fields["layers"], window=4096, period=period)
        return cls(**fields, windows=windows)


class SelfAttention(cohere.SelfAttention):
    def __init__(self, c: cohere.Config, layer: int) -> None:
        super().__init__(c, layer)
        if c.windows[layer] is None:
            self.rope = None


class Layer(cohere.Layer):
    attention_class = SelfAttention


class Model(cohere.Model):
    layer_class = Layer
