"""SmolLM3: Llama with every fourth layer not rotated.

Source: model_type "smollm3", https://huggingface.co/HuggingFaceTB/SmolLM3-3B; transformers
        modeling_smollm3.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models._windows import FULL, windows_of
from quire.models.base import Hf, field_of

CONVENTIONS = {
    "windows_on_request": True,
    "tied": True,
    "defaults": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    rotated: tuple[bool, ...]  # per layer

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf, tied=True)
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(
            **sizes,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
            windows=_windows(hf, sizes["layers"]),
            rotated=rotated_layers(hf, sizes["layers"]),
        )


def _windows(hf: Hf, layers: int) -> tuple[int | None, ...]:
    if not field_of(hf, "use_sliding_window", bool, default=False):
        return ()
    field_of(hf, "layer_types", list)
    return windows_of(hf, field_of(hf, "sliding_window", int), [FULL] * layers)


def rotated_layers(hf: Hf, layers: int) -> tuple[bool, ...]:
    """no_rope_layers has, contrary to its name, 1 for a layer that is rotated."""
    interval = field_of(hf, "no_rope_layer_interval", int, default=4)
    usual = [int((i + 1) % interval != 0) for i in range(layers)]
    found = field_of(hf, "no_rope_layers", list, default=usual)
    if len(found) < layers or not set(found) <= {0, 1}:
        raise ConfigError(
            f"config.json: no_rope_layers is {found!r:.80}; it must be 1 (rotated) or 0 for each "
            f"of {layers} layers"
        )
    return tuple(found[i] == 1 for i in range(layers))


class Layer(llama.Layer):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, layer)
        if not c.rotated[layer]:
            assert isinstance(self.self_attn, llama.SelfAttention)
            self.self_attn.rope = None


class Model(llama.Model):
    layer_class = Layer
