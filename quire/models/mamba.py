"""Mamba: layers of one norm and one mixer with a selective scan.

Source: model_type "mamba", https://huggingface.co/state-spaces/mamba-2.8b-hf; transformers
        modeling_mamba.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quire.layers.recurrent import MambaMixer, MambaSizes
from quire.models import mamba2
from quire.models._decoder import Decoder
from quire.models.base import Hf, ModelConfig, field_of

CONVENTIONS = {
    "recurrent": "mamba",
    "positions_kind": "computed",
    "tied": True,
    "defaults": {
        "num_attention_heads": 1,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "vocab_size": 50280,
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    mixer: MambaSizes

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        hidden = field_of(hf, "hidden_size", int)
        width = field_of(hf, "expand", int) * hidden
        rank = hf.get("time_step_rank", "auto")
        field_of(hf, "hidden_act", str, default="silu", one_of=("silu", "swish"))
        mixer = MambaSizes(
            inner=field_of(hf, "intermediate_size", int, default=width),
            state=field_of(hf, "state_size", int),
            kernel=field_of(hf, "conv_kernel", int),
            rank=rank if isinstance(rank, int) else -(-hidden // 16),
            bias=field_of(hf, "use_bias", bool, default=False),
            conv_bias=field_of(hf, "use_conv_bias", bool, default=True),
            eps=field_of(hf, "mixer_rms_eps", float, default=None),
        )
        tied = field_of(hf, "tie_word_embeddings", bool, default=True)
        return cls(**mamba2.sizes_of(hf, mixer.inner, 1, hidden, tied=tied), mixer=mixer)


class Layer(mamba2.Layer):
    def build_mixer(self, c: Config) -> nn.Module:
        return MambaMixer(c.hidden, c.mixer)


class Model(Decoder):
    layer_class = Layer
    weights = mamba2.Model.weights
