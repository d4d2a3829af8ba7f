"""Mamba: layers of one norm and one mixer with a selective scan.

Source: model_type "mamba", https://huggingface.co/state-spaces/mamba-2.8b-hf; transformers
        modeling_mamba.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import AddRMSNorm
from quire.layers.recurrent import MambaMixer, MambaSizes
from quire.models import mamba2
from quire.models._decoder import Decoder
from quire.models._recurrent import UNLIMITED_LEN, recurrent_fields, states_of
from quire.models.base import CarriedStates, Hf, ModelConfig, StepInputs, dtype_of, field_of

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
        eps = field_of(hf, "layer_norm_epsilon", float, default=1e-5)
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
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=field_of(hf, "num_hidden_layers", int),
            heads=1,
            kv_heads=1,
            head_dim=hidden,
            mlp=mixer.inner,
            max_len=UNLIMITED_LEN,
            norm_eps=eps,
            act="silu",
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            mixer=mixer,
            **recurrent_fields(hf),
        )


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mixer = MambaMixer(c.hidden, c.mixer)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.norm(x, res)
        return self.mixer(x, states_of(step)), res


class Model(Decoder):
    layer_class = Layer
    weights = mamba2.Model.weights
