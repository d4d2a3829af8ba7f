"""Reads quant_method "modelopt" (NVIDIA Model Optimizer): FP8, NVFP4, or layers of both.

The settings are in config.json, or in hf_quant_config.json under "quantization". `config_groups`
and `producer` repeat what `quant_algo` states.

Source: https://nvidia.github.io/Model-Optimizer/deployment/3_unified_hf.html
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.quant.compressed_tensors import KV_FORMAT_OF, read_kv_scheme
from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import (
    Json,
    read_globs,
    read_group_size,
    read_object,
    refuse_unknown,
    require_value,
)
from quire.config.quant.fp4 import NvFp4Format
from quire.config.quant.fp8 import Fp8Format

AT = "quantization_config"
FIELDS = frozenset(
    (
        *("quant_method", "quant_algo", "producer", "config_groups", "ignore", "exclude_modules"),
        *("kv_cache_scheme", "kv_cache_quant_algo", "group_size", "quantized_layers"),
        *("has_zero_point", "pre_quant_scale", "quantization"),
    )
)
UNREAD = ("has_zero_point", "pre_quant_scale")
LAYER_FIELDS = frozenset(("quant_algo", "group_size", *UNREAD))
WEIGHT_ONLY = NvFp4Format(codes="weight", global_scale="weight_scale_2", divides=False)
FORMATS: dict[str, WeightFormat] = {
    "FP8": Fp8Format(static_activations=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Format(),
    "NVFP4": replace(WEIGHT_ONLY, input_scale="input_scale", wide_inputs=True),
    "W4A16_NVFP4": WEIGHT_ONLY,
}
MIXED = "MIXED_PRECISION"
NVFP4_GROUP = 16


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    refuse_unknown(AT, found, FIELDS)
    stated = {**found, **read_object(f"{AT}.quantization", found.get("quantization"))}
    refuse_unknown(f"{AT}.quantization", stated, FIELDS)
    for key in UNREAD:
        require_value(f"{AT}.{key}", stated.get(key, False), False, None)
    kv_cache = read_kv_scheme(stated.get("kv_cache_scheme"))
    require_value(f"{AT}.kv_cache_quant_algo", stated.get("kv_cache_quant_algo"), None, "FP8")
    if stated.get("kv_cache_quant_algo") is not None:
        kv_cache = KV_FORMAT_OF["float"]
    group = stated.get("group_size")
    if group is not None:
        read_group_size(f"{AT}.group_size", group)
    plain = (*read_globs(stated, "ignore"), *read_globs(stated, "exclude_modules"))
    rules = unquantized(plain)
    if str(stated.get("quant_algo")).upper() == MIXED:
        layers = read_object(f"{AT}.quantized_layers", stated.get("quantized_layers"))
        own = tuple(
            LayerRule(name, _layer_format(f"{AT}.quantized_layers.{name}", layer))
            for name, layer in layers.items()
        )
        return QuantFacts(
            quant_method="modelopt", rules=rules + own, default=None, kv_cache=kv_cache
        )
    default = _format(AT, stated)
    return QuantFacts(quant_method="modelopt", rules=rules, default=default, kv_cache=kv_cache)


def _layer_format(at: str, layer: object) -> WeightFormat:
    found = read_object(at, layer)
    refuse_unknown(at, found, LAYER_FIELDS)
    for key in UNREAD:
        require_value(f"{at}.{key}", found.get(key, False), False, None)
    return _format(at, found)


def _format(at: str, stated: Json) -> WeightFormat:
    algo = str(stated.get("quant_algo")).upper()
    require_value(f"{at}.quant_algo", algo, *FORMATS, *((MIXED,) if at == AT else ()))
    if isinstance(form := FORMATS[algo], NvFp4Format):
        require_value(f"{at}.group_size", stated.get("group_size"), None, NVFP4_GROUP)
    return form
