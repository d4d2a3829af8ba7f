"""Adapters: decides how many the device and the host hold, and of which rank."""

from __future__ import annotations

from quire.config.decisions import DecisionLog
from quire.config.engine_config import AdapterSection
from quire.config.options import LoRAOptions
from quire.errors import ConfigError

ADAPTER_RANK_STEP = 16
"""A slot's rank is a multiple of it: quire.kernels.formats.lora_bank."""


def adapter_ranks(given: LoRAOptions) -> int:
    """Return the ranks of all slots of the device together; 0: adapters are off."""
    if not given.enable_lora:
        return 0
    return given.max_loras * -(-given.max_lora_rank // ADAPTER_RANK_STEP) * ADAPTER_RANK_STEP


def resolve_adapters(
    given: LoRAOptions, dtype: str, why: DecisionLog, *, server: bool
) -> AdapterSection | None:
    """Resolve adapters; None: they are off. dtype: the model's. Raises ConfigError."""
    if not given.enable_lora:
        return None
    if server:
        raise ConfigError("enable_lora is not supported in servers yet: use LLM, or leave it out")
    if given.lora_dtype not in ("auto", dtype):
        raise ConfigError(
            f"lora_dtype={given.lora_dtype!r} is not the model's dtype ({dtype}), which is the "
            "only one that adapters can have: leave it out"
        )
    host = given.max_cpu_loras
    if host is not None and host < given.max_loras:
        raise ConfigError(
            f"max_cpu_loras={host} is less than max_loras={given.max_loras}: a step could not have "
            "all its adapters"
        )
    reason = "max_loras" if host is None else "requested"
    return AdapterSection(
        max_adapters=given.max_loras,
        max_rank=given.max_lora_rank,
        max_host=int(why.record("adapters.max_host", host or given.max_loras, reason)),
        target_modules=given.lora_target_modules,
    )
