"""EXAONE 4: OLMo-2's norms after each half, a norm on every head, windows in most layers.

Layers without a window are not rotated, unless no layer has one.

Source: model_type "exaone4", https://huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B; transformers
        modeling_exaone4.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models import llama, olmo2, qwen3
from quire.models._rope import rotary_sizes_of
from quire.models._windows import read_periodic_windows
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "windows": "periodic",
    "window": 4096,
    "period": 4,
    "defaults": {"rms_norm_eps": 1e-5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**(sizes := rotary_sizes_of(hf)), windows=_windows(hf, sizes["layers"]))


def _windows(hf: Hf, layers: int) -> tuple[int | None, ...]:
    """A sliding_window of null means that there is none; a pattern may be written as "LLLG"."""
    if "sliding_window" in hf and hf["sliding_window"] is None:
        return ()
    found = hf.get("sliding_window_pattern")
    written = isinstance(found, str) and hf.get("layer_types") is not None
    period = 4 if written else field_of(hf, "sliding_window_pattern", int, default=4)
    return read_periodic_windows(hf, layers, window=4096, period=period)


class SelfAttention(qwen3.SelfAttention):
    def __init__(self, c: llama.Config, layer: int) -> None:
        super().__init__(c, c.window(layer))
        if c.windows and c.windows[layer] is None:
            self.rope = None


class Layer(olmo2.Layer):
    attention_class = SelfAttention


class Model(olmo2.Model):
    layer_class = Layer
