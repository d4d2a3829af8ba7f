"""Models with recurrent layers: what their configs and their layers share."""

from __future__ import annotations

from typing import Any

from quire.config.recurrent_layers import layer_kinds, state_facts
from quire.errors import ConfigError
from quire.layers.recurrent import Mamba2Sizes
from quire.models.base import Hf, StateStep, StepInputs, field_of

UNLIMITED_LEN = 1 << 20
"""Positions of a model whose state has no length."""


def recurrent_fields(hf: Hf) -> dict[str, Any]:
    """The fields of ModelConfig about recurrent layers."""
    return {"kinds": layer_kinds(hf), "states": state_facts(hf)}


def states_of(step: StepInputs) -> StateStep:
    """The states of a step."""
    assert step.states is not None, "the step has no recurrent states"
    return step.states


def dt_limit(hf: Hf, name: str = "time_step_limit") -> tuple[float, float]:
    """The bounds of time steps."""
    given = field_of(hf, name, list, default=[0.0, float("inf")])
    if len(given) != 2:
        raise ConfigError(f"config.json: {name} is {given!r:.80}; it must be two numbers")
    low, high = (one["__float__"] if isinstance(one, dict) else one for one in given)
    return float(low), float(high)  # transformers writes infinity as {"__float__": "Infinity"}


def mamba2_sizes(hf: Hf, eps: float) -> Mamba2Sizes:
    """The settings of Mamba-2 mixers, by the names that hybrids give them."""
    heads, hidden = field_of(hf, "mamba_n_heads", int), field_of(hf, "hidden_size", int)
    expanded = field_of(hf, "mamba_expand", int) * hidden
    inner = field_of(hf, "mamba_d_ssm", int, default=expanded)  # of Falcon-H1
    size = hf.get("mamba_d_head")
    size = size if isinstance(size, int) else inner // heads
    if heads * size != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads is {heads} and mamba_d_head {size}; their product must be "
            f"mamba_d_ssm, else mamba_expand * hidden_size, which is {inner}"
        )
    field_of(hf, "hidden_act", str, default="silu", one_of=("silu", "swish"))
    return Mamba2Sizes(
        heads=heads,
        head_dim=size,
        groups=field_of(hf, "mamba_n_groups", int),
        state=field_of(hf, "mamba_d_state", int),
        kernel=field_of(hf, "mamba_d_conv", int),
        eps=eps,
        bias=(bias := field_of(hf, "mamba_proj_bias", bool, default=False)),
        out_bias=bias,
        conv_bias=field_of(hf, "mamba_conv_bias", bool, default=True),
        dt_limit=dt_limit(hf),
    )
