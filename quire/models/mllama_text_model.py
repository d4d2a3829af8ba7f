"""Llama-3.2-Vision, its text half: Llama without the layers that attend to images.

Those layers add nothing where there is no image; they are not loaded. The embedding has eight rows
more than the head, for images.

Source: model_type "mllama_text_model", https://huggingface.co/meta-llama/Llama-3.2-11B-Vision;
        transformers modeling_mllama.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from quire.config.memory.kv_layout import LayerFacts
from quire.errors import ConfigError
from quire.layers import Embedding
from quire.models import llama
from quire.models._decoder import Decoder, MissingLayer
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, field_of

IMAGE_ROWS = 8
CONVENTIONS = {
    "uncached_layers": "cross_attention_layers",
    "defaults": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
    },
    "nested_defaults": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    cross_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes, cross = rotary_sizes_of(hf), field_of(hf, "cross_attention_layers", list)
        if len(set(cross)) != len(cross) or not set(cross) < set(range(sizes["layers"])):
            raise ConfigError(
                f"config.json: cross_attention_layers is {cross!r:.80}; it must be different "
                f"numbers of layers, of which there are {sizes['layers']}"
            )
        return cls(**sizes, cross_layers=tuple(cross))

    def attention_layers(self) -> tuple[LayerFacts, ...]:
        facts = super(Config, self).attention_layers()
        return facts[len(self.cross_layers) :]


def _layer(c: Config, layer: int) -> nn.Module:
    return MissingLayer() if layer in c.cross_layers else llama.Layer(c, layer)


class Model(Decoder):
    layer_class = staticmethod(_layer)
    weights = llama.Model.weights

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_tokens = Embedding(c.vocab + IMAGE_ROWS, c.hidden)
        absent = tuple(f"layers.{i}." for i in c.cross_layers)
        self.weights = replace(self.weights, absent=absent)
