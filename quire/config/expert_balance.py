"""Expert balance config: parses the JSON object of expert parallel load balancing (EPLB)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.engine_config import ExpertBalanceSection
from quire.config.options import Options
from quire.config.values import coerce
from quire.errors import ConfigError

OPTION_NAME = "eplb_config"
_FIELDS = {
    "num_redundant_experts": ("redundant", int),
    "step_interval": ("interval", int),
    "window_size": ("window", int),
    "log_balancedness": ("logs", bool),
}
_FIXED = {"policy": ("default",), "use_async": (False,)}
"""Keys of vLLM with one value here."""


def resolve_expert_balance(options: Options, experts: int) -> ExpertBalanceSection | None:
    """Return how experts are balanced; None: they are not. Raises ConfigError.

    experts: of a layer.
    """
    section = options.parallel
    ranks = 1
    if section.enable_expert_parallel:
        ranks = section.tensor_parallel_size * section.data_parallel_size
    found = _parse(section.eplb_config)
    if not section.enable_eplb:
        if section.eplb_config:
            raise ConfigError(f"{OPTION_NAME} is for enable_eplb, which is not set")
        return None
    if ranks == 1:
        raise ConfigError(
            "enable_eplb moves experts between ranks: it needs enable_expert_parallel and "
            "tensor_parallel_size or data_parallel_size of 2 or more"
        )
    if options.lora.enable_lora:
        raise ConfigError(
            "enable_eplb does not move adapters with experts yet: leave out enable_lora or "
            "enable_eplb"
        )
    most, total = experts * (ranks - 1), experts + found.redundant
    if total % ranks or found.redundant > most:
        fits = [n for n in range(most + 1) if (experts + n) % ranks == 0]
        raise ConfigError(
            f"{OPTION_NAME}: num_redundant_experts={found.redundant} with {experts} experts on "
            f"{ranks} ranks; each rank must have as many, so choose one of "
            f"{', '.join(map(str, fits[:4]))}"
        )
    return found


def _parse(given: Mapping[str, Any]) -> ExpertBalanceSection:
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{OPTION_NAME}.{key}"
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise ConfigError(
                    f"{name}={value!r} is not supported: experts are moved between two steps, by "
                    "load; leave it out"
                )
            continue
        if key not in _FIELDS:
            raise ConfigError(f"{OPTION_NAME} has no key {key!r}; allowed are {', '.join(_FIELDS)}")
        field, kind = _FIELDS[key]
        values[field] = coerce(name, kind, value)
        least = 0 if field == "redundant" else 1
        if kind is int and values[field] < least:
            raise ConfigError(f"{name} is {value}; it must be {least} or more")
    return ExpertBalanceSection(**values)
