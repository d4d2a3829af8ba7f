"""OLMo-3: OLMo-2 with windows in three of four layers, whose rotary positions are never scaled.

Source: model_type "olmo3", https://huggingface.co/allenai/Olmo-3-7B-Instruct; transformers
        modeling_olmo3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers import Rope, RopeConfig
from quire.models import olmo2
from quire.models._rope import rope_of, scaled_max_len, section_of
from quire.models._windows import FULL, SLIDING, read_periodic_windows
from quire.models.base import Hf, field_of, sizes_of

CONVENTIONS = {
    "windows": "periodic",
    "window": 4096,
    "period": 4,
    "windows_unscaled": True,
    "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(olmo2.Config):
    local_rope: RopeConfig  # of layers with a window

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = sizes_of(hf)
        bias = field_of(hf, "attention_bias", bool, default=False)
        full, local = section_of(hf, FULL), section_of({**hf, "rope_scaling": None}, SLIDING)
        return cls(
            **{**sizes, "max_len": scaled_max_len(hf, full)},
            rope=rope_of(hf, sizes["head_dim"], section=full),
            local_rope=rope_of(hf, sizes["head_dim"], section=local),
            qkv_bias=bias,
            o_bias=bias,
            windows=read_periodic_windows(hf, sizes["layers"], window=4096, period=4),
        )


class SelfAttention(olmo2.SelfAttention):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        if c.windows[layer] is not None:
            self.rope = Rope(c.local_rope, c.max_len)


class Layer(olmo2.Layer):
    attention_class = SelfAttention


class Model(olmo2.Model):
    layer_class = Layer
