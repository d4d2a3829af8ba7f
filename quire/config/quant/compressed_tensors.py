"""Reads quant_method "compressed-tensors" (llm-compressor).

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from quire.config.quant.facts import QuantFacts, unquantized
from quire.config.quant.fields import Json, read_names, require_value
from quire.config.quant.fp8 import BLOCK, Fp8Format
from quire.errors import ConfigError


def read(found: Json) -> QuantFacts:
    """Read one group of w8a8 floats. Raises ConfigError."""
    at = "quantization_config"
    groups = found.get("config_groups") or {}
    if len(groups) != 1 or found.get("sparsity_config") or found.get("transform_config"):
        raise ConfigError(
            f"config.json: {at} must have one entry in config_groups and no sparsity or "
            f"transforms; it has {len(groups)}: {', '.join(groups)}"
        )
    ((name, group),) = groups.items()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    require_value(f"{at}.config_groups.{name}.targets", group.get("targets"), ["Linear"])
    for what, args in (("weights", weights), ("input_activations", inputs)):
        where = f"{at}.config_groups.{name}.{what}"
        require_value(f"{where}.num_bits", args.get("num_bits"), 8)
        require_value(f"{where}.type", args.get("type"), "float")
        require_value(f"{where}.symmetric", args.get("symmetric", True), True)
    where = f"{at}.config_groups.{name}"
    strategy = weights.get("strategy")
    require_value(f"{where}.weights.strategy", strategy, "channel", "tensor", "block")
    by_block, static = strategy == "block", not inputs.get("dynamic", False)
    if by_block:
        require_value(
            f"{where}.weights.block_structure", weights.get("block_structure"), [BLOCK, BLOCK]
        )
        require_value(f"{where}.input_activations.group_size", inputs.get("group_size"), BLOCK)
    given = inputs.get("strategy")
    allowed = "group" if by_block else "tensor" if static else "token"
    require_value(f"{where}.input_activations.strategy", given, allowed)
    stored = Fp8Format(block=BLOCK if by_block else 0, static_activations=static)
    return QuantFacts(
        quant_method="compressed-tensors",
        rules=unquantized(read_names(found, "ignore")),
        default=stored,
    )
