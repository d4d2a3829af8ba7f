"""Mamba-2: layers of one norm and one mixer, whose scan is a product of matrices in chunks.

Source: model_type "mamba2", https://huggingface.co/state-spaces/mamba2-2.7b; transformers
        modeling_mamba2.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire.layers import AddRMSNorm
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes
from quire.models._decoder import Decoder
from quire.models._recurrent import (
    UNLIMITED_LEN,
    dt_limit,
    recurrent_fields,
    states_of,
)
from quire.models.base import (
    CarriedStates,
    Hf,
    ModelConfig,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)

CONVENTIONS = {
    "recurrent": "mamba2",
    "positions_kind": "computed",
    "defaults": {
        "num_heads": 128,
        "head_dim": 64,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "conv_kernel": 4,
        "n_groups": 8,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    mixer: Mamba2Sizes

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        heads, size = field_of(hf, "num_heads", int), field_of(hf, "head_dim", int)
        eps = field_of(hf, "layer_norm_epsilon", float, default=1e-5)
        field_of(hf, "hidden_act", str, default="silu", one_of=("silu", "swish"))
        mixer = Mamba2Sizes(
            heads=heads,
            head_dim=size,
            groups=field_of(hf, "n_groups", int),
            state=field_of(hf, "state_size", int),
            kernel=field_of(hf, "conv_kernel", int),
            eps=eps,
            bias=(bias := field_of(hf, "use_bias", bool, default=False)),
            out_bias=bias,
            conv_bias=field_of(hf, "use_conv_bias", bool, default=True),
            dt_limit=dt_limit(hf),
        )
        tied = field_of(hf, "tie_word_embeddings", bool, default=False)
        return cls(**sizes_of(hf, mixer.inner, heads, size, tied=tied), mixer=mixer)


def sizes_of(hf: Hf, inner: int, heads: int, head_dim: int, *, tied: bool) -> dict[str, Any]:
    """The fields of a ModelConfig whose layers are mixers alone, of `inner` channels."""
    return {
        "vocab": field_of(hf, "vocab_size", int),
        "hidden": field_of(hf, "hidden_size", int),
        "layers": field_of(hf, "num_hidden_layers", int),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim,
        "mlp": inner,
        "max_len": UNLIMITED_LEN,
        "norm_eps": field_of(hf, "layer_norm_epsilon", float, default=1e-5),
        "act": "silu",
        "tied": tied,
        "dtype": dtype_of(hf),
        **recurrent_fields(hf),
    }


class Layer(nn.Module):
    """Subclasses have another mixer."""

    def __init__(self, c: Any, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mixer = self.build_mixer(c)

    def build_mixer(self, c: Any) -> nn.Module:
        return Mamba2Mixer(c.hidden, c.mixer)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.norm(x, res)
        return self.mixer(x, states_of(step)), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("backbone.",),
        alias={
            "backbone.embedding.weight": "embed_tokens.weight",
            "backbone.embeddings.weight": "embed_tokens.weight",
            "backbone.norm_f.weight": "norm.weight",
        },
        tie={"lm_head": "embed_tokens"},
    )
