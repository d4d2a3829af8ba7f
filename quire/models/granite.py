"""Granite 3: Llama with four factors: on embeddings, scores, what a layer adds, and logits.

The residual is kept divided by the factor of what layers add (m), so that no layer multiplies:
x / m + y instead of x + m * y. A norm gives the same for x / m if its epsilon is divided by m * m.

Source: model_type "granite", https://huggingface.co/ibm-granite/granite-3.3-8b-instruct;
        transformers modeling_granite.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.errors import ConfigError
from quire.layers import scale
from quire.models import llama
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    embed_factor: float  # of token embeddings, over that of what layers add

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**multiplied_sizes(hf), mlp_bias=field_of(hf, "mlp_bias", bool, default=False))


def multiplied_sizes(hf: Hf) -> dict[str, Any]:
    """The fields of Config, those about the MLP aside."""
    sizes = rotary_sizes_of(hf)
    branch = _factor(hf, "residual_multiplier")
    bias = field_of(hf, "attention_bias", bool, default=False)
    return {
        **sizes,
        "norm_eps": sizes["norm_eps"] / branch**2,
        "embed_factor": _factor(hf, "embedding_multiplier") / branch,
        "scale": _factor(hf, "attention_multiplier"),
        "logit_scale": 1 / _factor(hf, "logits_scaling"),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _factor(hf: Hf, key: str) -> float:
    found = field_of(hf, key, float, default=1.0)
    if not found > 0:
        raise ConfigError(f"config.json: {key} is {found}; it must be positive")
    return found


class Model(llama.Model):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_factor = c.embed_factor

    def embed(self, step: StepInputs) -> Tensor:
        """Given vectors are multiplied too, as in transformers."""
        return scale(super().embed(step), self.embed_factor)
