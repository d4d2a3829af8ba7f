"""Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, and factors of products.

Keys are multiplied through the scale of scores. Of an MLP, gate and up are multiplied together, and
their product is divided by the factor of the latter.

Source: model_type "falcon_h1", https://huggingface.co/tiiuae/Falcon-H1-1.5B-Instruct; transformers
        modeling_falcon_h1.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import AddRMSNorm, add, scale
from quire.layers.recurrent import Mamba2Mixer, Mamba2Sizes
from quire.models import bamba, llama
from quire.models._decoder import Decoder, GatedMLP
from quire.models._recurrent import mamba2_sizes, recurrent_fields, states_of
from quire.models._rope import rotary_sizes_of
from quire.models.base import CarriedStates, Hf, StepInputs, field_of

CONVENTIONS = {
    "recurrent": "mamba2",
    "recurrent_layers": "both",
    "defaults": {
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    mixer: Mamba2Sizes
    mixer_factors: tuple[float, float]  # of what mixers read, and of what they add
    attention_factors: tuple[float, float]
    mlp_factors: tuple[float, float]  # of gates, and of what MLPs add

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = rotary_sizes_of(hf)
        bias = field_of(hf, "attention_bias", bool, default=False)
        field_of(hf, "mamba_use_mlp", bool, default=True, one_of=(True,))
        return cls(
            **sizes,
            **recurrent_fields(hf),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
            embed_scale=_factor(hf, "embedding_multiplier"),
            logit_scale=_factor(hf, "lm_head_multiplier"),
            scale=_factor(hf, "key_multiplier") / sizes["head_dim"] ** 0.5,
            mixer=_mixer_sizes(hf, sizes["norm_eps"]),
            mixer_factors=(_factor(hf, "ssm_in_multiplier"), _factor(hf, "ssm_out_multiplier")),
            attention_factors=(
                _factor(hf, "attention_in_multiplier"),
                _factor(hf, "attention_out_multiplier"),
            ),
            mlp_factors=_mlp_factors(hf),
        )


def _mixer_sizes(hf: Hf, eps: float) -> Mamba2Sizes:
    if "mamba_d_ssm" not in hf:  # null means as wide as mamba_expand states
        raise ConfigError("config.json: mamba_d_ssm is missing; it must be an integer or null")
    last = field_of(hf, "mamba_norm_before_gate", bool, default=True)
    normed = field_of(hf, "mamba_rms_norm", bool, default=False)
    return replace(
        mamba2_sizes(hf, eps),
        out_bias=field_of(hf, "projectors_bias", bool, default=False),
        norm=("gate_last" if last else "gate_first") if normed else "none",
        multipliers=_factors(hf, "ssm_multipliers", 5),
    )


def _mlp_factors(hf: Hf) -> tuple[float, float]:
    gate, down = _factors(hf, "mlp_multipliers", 2)
    if not gate:
        raise ConfigError("config.json: mlp_multipliers has 0.0 for gates; it must not be 0")
    return gate, down


def _factor(hf: Hf, key: str) -> float:
    return field_of(hf, key, float, default=1.0)


def _factors(hf: Hf, key: str, count: int) -> tuple[float, ...]:
    given = field_of(hf, key, list, default=[1.0] * count)
    if len(given) != count or not all(type(one) in (int, float) for one in given):
        raise ConfigError(f"config.json: {key} is {given!r:.80}; it must be {count} numbers")
    return tuple(map(float, given))


def multiply(x: Tensor, factor: float) -> Tensor:
    """x times a factor, which most sizes have at one."""
    return x if factor == 1.0 else scale(x, factor)


class MLP(GatedMLP):
    def __init__(self, c: Config) -> None:
        super().__init__(c.hidden, c.mlp, c.act, c.mlp_bias)
        self.gate_factor, self.factor = c.mlp_factors

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(multiply(self.gate_up_proj(x), self.gate_factor))
        return multiply(self.down_proj(multiply(x, 1 / self.gate_factor)), self.factor)


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.mixer_factors, self.attention_factors = c.mixer_factors, c.attention_factors
        self.input_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mamba = Mamba2Mixer(c.hidden, c.mixer)
        self.self_attn = llama.SelfAttention(c, None)
        self.pre_ff_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.feed_forward = MLP(c)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.input_layernorm(x, res)
        before, after = self.mixer_factors
        mixed = multiply(self.mamba(multiply(x, before), states_of(step)), after)
        before, after = self.attention_factors
        attended = multiply(self.self_attn(multiply(x, before), step), after)
        x, res = self.pre_ff_layernorm(add(mixed, attended), res)
        return self.feed_forward(x), res


class Model(Decoder):
    layer_class = Layer
    weights = bamba.Model.weights
