"""Reads quant_method "quark" (AMD Quark): FP8, INT8 and MXFP4, for all layers or for a pattern's.

Source: https://quark.docs.amd.com/latest/pytorch/export/quark_export_hf.html
"""

from __future__ import annotations

from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import (
    Json,
    from_glob,
    read_globs,
    read_names,
    read_object,
    refuse_unknown,
    require_value,
)
from quire.config.quant.fp4 import MxFp4Format
from quire.config.quant.fp8 import Fp8Format
from quire.config.quant.int8 import Int8Format

AT = "quantization_config"
FIELDS = frozenset(
    (
        *("quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config"),
        *("exclude", "export", "algo_config", "kv_cache_quant_config", "kv_cache_post_rope"),
        *("quant_mode", "softmax_quant_spec", "version", "log_severity_level"),
    )
)
LAYER_FIELDS = frozenset(("weight", "input_tensors", "output_tensors", "bias", "target_device"))
SPEC_FIELDS = frozenset(
    (
        *("dtype", "qscheme", "ch_axis", "group_size", "symmetric", "is_dynamic", "round_method"),
        *("scale_type", "scale_format", "scale_calculation_mode", "mx_element_dtype"),
        *("observer_cls", "is_scale_quant", "zero_point_type"),
    )
)
WITHOUT_TRACE = ("awq", "gptq", "gptaq", "smooth", "autosmoothquant")
"""Algorithms that leave nothing to do when a model runs."""

DTYPES = ("fp8_e4m3", "int8", "fp4")


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    refuse_unknown(AT, found, FIELDS)
    for key in ("layer_type_quant_config", "kv_cache_quant_config", "softmax_quant_spec"):
        require_value(f"{AT}.{key}", found.get(key) or None, None)
    algorithms = found.get("algo_config") or ()
    for one in algorithms if isinstance(algorithms, (list, tuple)) else (algorithms,):
        name = read_object(f"{AT}.algo_config", one).get("name")
        require_value(f"{AT}.algo_config.name", name, *WITHOUT_TRACE)
    export = read_object(f"{AT}.export", found.get("export"))
    stored = export.get("weight_format", "real_quantized")
    require_value(f"{AT}.export.weight_format", stored, "real_quantized")
    cached = read_names(export, "kv_cache_group")
    layers = read_object(f"{AT}.layer_quant_config", found.get("layer_quant_config"))
    own = tuple(
        LayerRule(
            from_glob(name, "layer_quant_config"),
            _format(f"{AT}.layer_quant_config.{name}", layer, cached=name in cached),
        )
        for name, layer in layers.items()
    )
    return QuantFacts(
        quant_method="quark",
        rules=unquantized(read_globs(found, "exclude")) + own,
        default=_format(f"{AT}.global_quant_config", found.get("global_quant_config")),
    )


def _format(at: str, stated: object, *, cached: bool = False) -> WeightFormat | None:
    """Return the format of layers. cached: their outputs go to the KV cache, with a scale."""
    layer = read_object(at, stated)
    refuse_unknown(at, layer, LAYER_FIELDS)
    for key in ("bias", "target_device", *(() if cached else ("output_tensors",))):
        require_value(f"{at}.{key}", layer.get(key), None)
    weight = read_object(f"{at}.weight", layer.get("weight"))
    inputs = read_object(f"{at}.input_tensors", layer.get("input_tensors"))
    for key, spec in (("weight", weight), ("input_tensors", inputs)):
        refuse_unknown(f"{at}.{key}", spec, SPEC_FIELDS)
        require_value(f"{at}.{key}.is_dynamic", spec.get("is_dynamic"), None, True, False)
    if not weight:
        require_value(f"{at}.input_tensors", inputs or None, None)
        return None
    require_value(f"{at}.weight.dtype", weight.get("dtype"), *DTYPES)
    require_value(f"{at}.weight.is_dynamic", weight.get("is_dynamic", False), False, None)
    if weight["dtype"] == "fp4":
        require_value(f"{at}.weight.qscheme", weight.get("qscheme"), "per_group")
        require_value(f"{at}.weight.group_size", weight.get("group_size"), 32)
        require_value(f"{at}.weight.scale_format", weight.get("scale_format"), "e8m0")
        require_value(f"{at}.input_tensors.is_dynamic", inputs.get("is_dynamic", True), True)
        return MxFp4Format(codes="weight", wide_inputs=bool(inputs))
    return _eight_bits(at, weight, inputs)


def _eight_bits(at: str, weight: Json, inputs: Json) -> WeightFormat:
    """FP8 or INT8 weights, and rows of the same numbers."""
    require_value(f"{at}.weight.qscheme", weight.get("qscheme"), "per_tensor", "per_channel")
    require_value(f"{at}.input_tensors.dtype", inputs.get("dtype"), weight["dtype"])
    fixed = not inputs.get("is_dynamic", False)
    allowed = ("per_tensor",) if fixed else ("per_token", "per_channel")
    require_value(f"{at}.input_tensors.qscheme", inputs.get("qscheme"), *allowed)
    if weight["dtype"] != "int8":
        return Fp8Format(static_activations=fixed)
    symmetric = inputs.get("symmetric", True)
    require_value(f"{at}.weight.symmetric", weight.get("symmetric", True), True)
    require_value(f"{at}.input_tensors.symmetric", symmetric, True, False)
    return Int8Format(symmetric_inputs=symmetric, static_activations=fixed, extra_zeros=True)
