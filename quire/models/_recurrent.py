"""Models with recurrent layers: what their configs and their layers share."""

from __future__ import annotations

from typing import Any

from quire.config.recurrent_layers import layer_kinds, state_facts
from quire.errors import ConfigError
from quire.models._decoder import Decoder
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


class RecurrentDecoder(Decoder):
    """Base of models with recurrent layers."""

    is_recordable = False  # their kernels are not native yet
