"""Reads quant_method "auto-round" (Intel): GPTQ or AWQ tensors with settings of single layers.

Source: https://github.com/intel/auto-round
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.config.quant import awq, gptq
from quire.config.quant.facts import LayerRule, QuantFacts
from quire.config.quant.fields import Json, check_pattern, refuse_unknown, require_value
from quire.errors import ConfigError

PACKINGS: Mapping[str, Callable[[Json], QuantFacts]] = {
    "auto_gptq": gptq.read,
    "gptq": gptq.read,
    "auto_awq": awq.read,
    "awq": awq.read,
}
"""packing_format, without the prefix "auto_round:" -> reader of such tensors."""

_OWN = frozenset({"packing_format", "extra_config", "backend", "data_type", "act_bits", "sym"})
_FORMAT_FIELDS = frozenset({"bits", "group_size", "sym", "data_type"})
_OF_LAYERS = _FORMAT_FIELDS | {
    *("act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic"),
    *("super_bits", "super_group_size", "scale_dtype", "fixed_by_user", "in_blocks", "tmp_dtype"),
}
_REGEX = re.compile(r"[*+?\[\](){}|^$\\]")


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    packing = str(found.get("packing_format") or "auto_round:auto_gptq")
    require_value(f"{at}.packing_format", packing.removeprefix("auto_round:"), *PACKINGS)
    require_value(f"{at}.data_type", found.get("data_type", "int"), "int")
    reader = PACKINGS[packing.removeprefix("auto_round:")]
    common = {key: value for key, value in found.items() if key not in _OWN}
    common["lm_head"] = bool(found.get("quant_lm_head"))
    facts = reader({**common, **_signs(found, reader), "act_bits": found.get("act_bits")})
    rules: list[LayerRule] = []
    extra = found.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"config.json: {at}.extra_config is {extra!r:.80}; it must be an object")
    for name, settings in extra.items():
        rules.append(LayerRule(_pattern(name), _layer_format(name, settings, found, reader)))
    if not any(rule.pattern == "lm_head" for rule in rules) and not found.get("quant_lm_head"):
        rules.append(LayerRule("lm_head", None))
    return QuantFacts(
        quant_method=facts.quant_method, rules=(*rules, *facts.rules), default=facts.default
    )


def _signs(found: Json, reader: Callable[[Json], QuantFacts]) -> dict[str, Any]:
    """The field that states whether all zeros are in the middle, by its name in the format."""
    symmetric = found.get("sym", True)
    return {"zero_point": not symmetric} if reader is awq.read else {"sym": symmetric}


def _pattern(name: str) -> str:
    """The rule's pattern of a name in extra_config, which may be a regular expression."""
    if not _REGEX.search(name):
        return name
    check_pattern(name, "quantization_config.extra_config")
    return f"re:{name}"


def _layer_format(
    name: str, settings: Any, found: Json, reader: Callable[[Json], QuantFacts]
) -> Any:
    """The format of one layer; None: it has 16 bits or more."""
    at = f"quantization_config.extra_config[{name!r:.80}]"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {at} is {settings!r:.80}; it must be an object")
    refuse_unknown(at, settings, _OF_LAYERS)
    if settings.get("bits", found.get("bits")) in (16, 32):
        return None
    require_value(f"{at}.data_type", settings.get("data_type", "int"), "int")
    require_value(f"{at}.act_bits", settings.get("act_bits"), None, 16, 32)
    own = {key: settings.get(key, found.get(key)) for key in ("bits", "group_size")}
    signs = _signs({"sym": settings.get("sym", found.get("sym", True))}, reader)
    return reader({**own, **signs, "lm_head": True}).default
