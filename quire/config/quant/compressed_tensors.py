"""Reads quant_method "compressed-tensors" (llm-compressor).

config_groups name which layers are stored how; the most specific target decides (an exact name,
then a pattern, then the class "Linear"), and `ignore` goes before all of them.

Source: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import (
    Json,
    read_group_size,
    read_names,
    read_object,
    refuse_unknown,
    require_value,
)
from quire.config.quant.fp4 import MxFp4Format, NvFp4Format
from quire.config.quant.fp8 import BLOCK, Fp8Format, Fp8WeightOnlyFormat
from quire.config.quant.held import MatrixFacts, group_bits
from quire.config.quant.int8 import Int8Format
from quire.errors import ConfigError

AT = "quantization_config"
FIELDS = frozenset(
    (
        *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "version"),
        *("quantization_status", "global_compression_ratio", "sparsity_config", "dequantize"),
        *("transform_config", "run_compressed", "use_optimized_inference", "moe_sparsity_config"),
    )
)
GROUP_FIELDS = frozenset(
    ("targets", "weights", "input_activations", "output_activations", "format")
)
ARGS_FIELDS = frozenset(
    (
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
        *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    )
)
CLASS = "Linear"
"""The class of layers that a target may name; there are no others with weights to multiply."""
BITS = range(2, 9)
TRANSFORM_FIELDS = frozenset(
    ("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
)
TRANSFORM_ARGS = frozenset(("targets", "location", "inverse", "ignore"))
IN_WEIGHTS = ("weight_input", "weight_output")
"""Locations of transforms that are multiplied into the weights of a checkpoint."""
ONLINE = ("input", "output", "k_cache", "q_attn")
MXFP8 = "mxfp8-quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntFormat(WeightFormat):
    """Integers of two to eight bits; activations stay in 16 bits.

    packed: fields of int32 words, else one int8 each. group: inputs that share a scale; None: one
    scale per output or per tensor.
    """

    method: ClassVar[str] = "compressed_tensors"
    bits: int
    group: int | None
    symmetric: bool = True
    packed: bool = True
    per_tensor: bool = False
    by_activation: bool = False  # actorder "group": weight_g_idx has the group of each input

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        if not self.packed:
            return WeightFormat.stored_size(self, matrix)
        *outputs, words = matrix.tensor("weight_packed").shape
        inputs = words * 32 // self.bits  # or fewer: fields may be padded
        if self.group is not None:
            inputs = min(inputs, matrix.tensor("weight_scale").shape[-1] * self.group)
        return math.prod(outputs), inputs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        bits = 8 if self.bits == 7 else self.bits
        numbers = matrix.float_bits("weight_scale") + 8 * (not self.symmetric)
        order = 32 / matrix.outputs if self.by_activation else 0
        group = self.group or matrix.inputs
        return group_bits(bits, group, numbers, matrix.inputs, device) + order


KV_FORMAT_OF = {"float": "float8_e4m3fn", "int": "int8"}
"""Type of kv_cache_scheme -> KV format."""


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    refuse_unknown(AT, found, FIELDS)
    for key in ("sparsity_config", "moe_sparsity_config"):
        sparsity = read_object(f"{AT}.{key}", found.get(key))
        require_value(f"{AT}.{key}.format", sparsity.get("format", "dense"), "dense")
    _check_transforms(read_object(f"{AT}.transform_config", found.get("transform_config")))
    kv_cache = read_kv_scheme(found.get("kv_cache_scheme"))
    groups = read_object(f"{AT}.config_groups", found.get("config_groups"))
    if not groups and kv_cache is None:
        raise ConfigError(f"config.json: {AT}.config_groups has no entry; it must have one")
    rules: list[LayerRule] = []
    default: list[WeightFormat | None] = []
    for name, group in groups.items():
        targets, form = _read_group(name, group, found.get("format"))
        for target in targets:
            if target == CLASS:
                default.append(form)
            else:
                rules.append(LayerRule(target, form))
    if len(default) > 1:
        raise ConfigError(
            f"config.json: {AT}.config_groups has {len(default)} groups with the target "
            f"{CLASS!r}; one can have it"
        )
    rules.sort(key=lambda rule: rule.pattern.startswith("re:"))
    return QuantFacts(
        quant_method="compressed-tensors",
        rules=unquantized(read_names(found, "ignore")) + tuple(rules),
        default=default[0] if default else None,
        kv_cache=kv_cache,
    )


def read_kv_scheme(scheme: object) -> str | None:
    """Return the KV format whose scales a checkpoint has; None: none is stated.

    Raises ConfigError for scales that attention layers do not read.
    """
    if scheme is None:
        return None
    at = f"{AT}.kv_cache_scheme"
    args = read_object(at, scheme)
    refuse_unknown(at, args, ARGS_FIELDS)
    require_value(f"{at}.num_bits", args.get("num_bits"), 8)
    require_value(f"{at}.type", args.get("type"), *KV_FORMAT_OF)
    require_value(f"{at}.symmetric", args.get("symmetric", True), True)
    require_value(f"{at}.strategy", args.get("strategy", "tensor"), "tensor", "attn_head")
    require_value(f"{at}.dynamic", args.get("dynamic", False), False)
    return KV_FORMAT_OF[str(args["type"])]


def _check_transforms(config: Json) -> None:
    """Raise ConfigError for transforms that are not in the weights already."""
    at = f"{AT}.transform_config"
    refuse_unknown(at, config, frozenset(["config_groups"]))
    groups = read_object(f"{at}.config_groups", config.get("config_groups"))
    for name, group in groups.items():
        here = f"{at}.config_groups.{name}"
        scheme = read_object(here, group)
        refuse_unknown(here, scheme, TRANSFORM_FIELDS)
        applied = scheme.get("apply") or ()
        if not isinstance(applied, list | tuple):
            raise ConfigError(f"config.json: {here}.apply is {applied!r:.80}; it must be a list")
        for one in applied:
            args = read_object(f"{here}.apply", one)
            refuse_unknown(f"{here}.apply", args, TRANSFORM_ARGS)
            location = args.get("location")
            if location in ONLINE:
                raise ConfigError(
                    f"config.json: {here}.apply.location is {location!r}: a rotation of activations"
                    " while the model runs, which quire does not apply; use a checkpoint whose "
                    f"rotations are in the weights ({' or '.join(IN_WEIGHTS)})"
                )
            require_value(f"{here}.apply.location", location, *IN_WEIGHTS)


def _read_group(
    name: str, group: object, whole: object
) -> tuple[tuple[str, ...], WeightFormat | None]:
    """Return the targets of a group, and their format. whole: the format of the configuration."""
    at = f"{AT}.config_groups.{name}"
    if isinstance(group, list):  # the name is that of a preset, and the value its targets
        if (preset := _presets().get(name.upper())) is None:
            raise ConfigError(
                f"config.json: {at} is a list of targets, so it must be named after a preset; "
                f"presets: {', '.join(sorted(_presets()))}"
            )
        group = {"targets": group, **preset}
    scheme = read_object(at, group)
    refuse_unknown(at, scheme, GROUP_FIELDS)
    targets = read_names(scheme, "targets")
    for target in targets:
        if target != CLASS and not target.startswith("re:") and target[:1].isupper():
            raise ConfigError(
                f"config.json: {at}.targets has the class {target!r:.80}; supported: {CLASS!r}, "
                "names of layers, and re: with a pattern"
            )
    require_value(f"{at}.output_activations", scheme.get("output_activations"), None)
    weights = read_object(f"{at}.weights", scheme.get("weights"))
    inputs = read_object(f"{at}.input_activations", scheme.get("input_activations"))
    if not weights:
        require_value(f"{at}.input_activations", inputs or None, None)
        return targets, None
    for what, args in (("weights", weights), ("input_activations", inputs)):
        refuse_unknown(f"{at}.{what}", args, ARGS_FIELDS)
        require_value(f"{at}.{what}.symmetric", args.get("symmetric", True), True, False)
    require_value(f"{at}.weights.dynamic", weights.get("dynamic", False), False)
    if inputs:
        where = f"{at}.input_activations"
        require_value(f"{where}.num_bits", inputs.get("num_bits", 8), *BITS, 16)
        require_value(f"{where}.type", _lower(inputs.get("type", "int")), "int", "float")
        require_value(f"{where}.dynamic", inputs.get("dynamic", False), True, False, "local")
    stored = scheme.get("format") or whole
    kind, bits = _lower(weights.get("type", "int")), weights.get("num_bits", 8)
    require_value(f"{at}.weights.type", kind, "int", "float")
    if kind == "int":
        return targets, _integers(at, weights, inputs, stored)
    require_value(f"{at}.weights.num_bits", bits, 4, 8)
    require_value(f"{at}.weights.symmetric", weights.get("symmetric", True), True)
    return targets, (_fp8 if bits == 8 else _fp4)(at, weights, inputs, stored)


def _integers(at: str, weights: Json, inputs: Json, stored: object) -> WeightFormat:
    """W8A8 where activations are quantized by row or tensor, else integers for 16-bit rows."""
    if stored in (None, "mixed-precision"):
        stored = "int-quantized" if inputs else "pack-quantized"
    require_value(f"{at}.format", stored, "pack-quantized", "int-quantized", "naive-quantized")
    bits, strategy = weights.get("num_bits", 8), _strategy(weights)
    require_value(f"{at}.weights.num_bits", bits, *BITS)
    require_value(f"{at}.weights.strategy", strategy, "group", "channel", "tensor")
    actorder = weights.get("actorder") or None
    require_value(f"{at}.weights.actorder", actorder, None, "weight", "static", "group", "dynamic")
    symmetric = weights.get("symmetric", True)
    in_bytes = stored != "pack-quantized" and bits == 8 and symmetric and strategy != "group"
    if in_bytes and inputs.get("num_bits") == 8 and _lower(inputs.get("type", "int")) == "int":
        fixed = not inputs.get("dynamic", False)
        require_value(
            f"{at}.input_activations.strategy", _strategy(inputs), "tensor" if fixed else "token"
        )
        return Int8Format(
            symmetric_inputs=bool(inputs.get("symmetric", True)), static_activations=fixed
        )
    if inputs:  # such activations are finer than the weights: 16 bits only add precision
        require_value(f"{at}.input_activations.dynamic", inputs.get("dynamic"), True)
    return PackedIntFormat(
        bits=bits,
        group=read_group_size(f"{at}.weights.group_size", weights.get("group_size"))
        if strategy == "group"
        else None,
        symmetric=bool(symmetric),
        packed=stored == "pack-quantized",
        per_tensor=strategy == "tensor",
        by_activation=actorder in ("group", "dynamic"),
        wide_inputs=bool(inputs),
    )


def _fp8(at: str, weights: Json, inputs: Json, stored: object) -> WeightFormat:
    if stored == MXFP8 or "uint8" in str(weights.get("scale_dtype")):
        return _mxfp8(at, weights, inputs, stored)
    require_value(
        f"{at}.format", stored, None, "float-quantized", "naive-quantized", "mixed-precision"
    )
    strategy = _strategy(weights)
    allowed = ("channel", "tensor", "block", *(() if inputs else ("group",)))
    require_value(f"{at}.weights.strategy", strategy, *allowed)
    by_block = strategy == "block"
    if by_block:
        structure = weights.get("block_structure")
        require_value(f"{at}.weights.block_structure", structure, [BLOCK, BLOCK])
    if not inputs:
        group = (
            read_group_size(f"{at}.weights.group_size", weights.get("group_size"))
            if strategy == "group"
            else None
        )
        return Fp8WeightOnlyFormat(
            rows=BLOCK if by_block else 1, group=BLOCK if by_block else group
        )
    require_value(f"{at}.input_activations.num_bits", inputs.get("num_bits"), 8)
    require_value(f"{at}.input_activations.type", _lower(inputs.get("type")), "float")
    require_value(f"{at}.input_activations.symmetric", inputs.get("symmetric", True), True)
    if by_block:
        require_value(f"{at}.input_activations.group_size", inputs.get("group_size"), BLOCK)
    static = not inputs.get("dynamic", False)
    scheme = "group" if by_block else "tensor" if static else "token"
    require_value(f"{at}.input_activations.strategy", _strategy(inputs), scheme)
    return Fp8Format(block=BLOCK if by_block else 0, static_activations=static)


def _mxfp8(at: str, weights: Json, inputs: Json, stored: object) -> WeightFormat:
    """A power of two per 32 inputs. Rows were meant to be so, too."""
    require_value(f"{at}.format", stored, None, MXFP8, "mixed-precision")
    require_value(f"{at}.weights.strategy", _strategy(weights), "group")
    require_value(f"{at}.weights.group_size", weights.get("group_size"), 32)
    require_value(f"{at}.input_activations.dynamic", inputs.get("dynamic", True), True)
    return Fp8WeightOnlyFormat(group=32, powers=True, wide_inputs=bool(inputs))


def _fp4(at: str, weights: Json, inputs: Json, stored: object) -> WeightFormat:
    """NVFP4 or MXFP4: the number of inputs that share a scale is that of one of them."""
    names = {16: "nvfp4-pack-quantized", 32: "mxfp4-pack-quantized"}
    group = weights.get("group_size", 0)
    require_value(f"{at}.weights.group_size", group, *names)
    require_value(f"{at}.format", stored, None, names[group], "mixed-precision")
    require_value(
        f"{at}.weights.strategy", _strategy(weights), "tensor_group" if group == 16 else "group"
    )
    if group == 32:
        require_value(f"{at}.input_activations.dynamic", inputs.get("dynamic", True), True)
        return MxFp4Format(wide_inputs=bool(inputs))
    fixed = bool(inputs) and inputs.get("dynamic", False) is not True
    scale = "input_global_scale" if fixed else None
    return NvFp4Format(input_scale=scale, wide_inputs=bool(inputs))


def _group_size(at: str, weights: Json) -> int | None:
    return read_group_size(f"{at}.weights.group_size", weights.get("group_size"))


def _strategy(args: Json) -> Any:
    """The strategy as stated, or as the group size implies it."""
    if (stated := args.get("strategy")) is not None:
        return _lower(stated)
    group = args.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _lower(value: object) -> Any:
    return value.lower() if isinstance(value, str) else value


def _presets() -> Mapping[str, dict[str, Any]]:
    """Names of presets -> the groups that they stand for, without targets."""
    rows = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    floats = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    found: dict[str, dict[str, Any]] = {"UNQUANTIZED": {}}
    for bits in BITS:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
        found[f"W{bits}A16"] = {"weights": weights}
        if bits < 8:
            found[f"W{bits}A8"] = {"weights": weights, "input_activations": rows}
        if bits < 5:
            inputs = {**rows, "num_bits": 4}
            found[f"W{bits}A4"] = {"weights": weights, "input_activations": inputs}
    four = found["W4A16"]["weights"]
    found["W4A16_ASYM"] = {"weights": {**four, "symmetric": False}}
    found["W4AFP8"] = {"weights": four, "input_activations": floats}
    bytes_ = {"num_bits": 8, "type": "int", "strategy": "channel"}
    for name in ("W8A8", "INT8", "INT8_W8A8"):
        found[name] = {"weights": bytes_, "input_activations": rows}
    fp8 = {"num_bits": 8, "type": "float", "dynamic": False}
    tensor, channel = {**fp8, "strategy": "tensor"}, {**fp8, "strategy": "channel"}
    block = {**fp8, "strategy": "block", "block_structure": [BLOCK, BLOCK]}
    by_group = {**floats, "strategy": "group", "group_size": BLOCK}
    found["FP8"] = {"weights": tensor, "input_activations": tensor}
    found["FP8_DYNAMIC"] = {"weights": channel, "input_activations": floats}
    found["FP8_BLOCK"] = {"weights": block, "input_activations": by_group}
    nv = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    mx = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    mx8 = {**mx, "num_bits": 8, "scale_dtype": "torch.uint8"}
    found["MXFP8A16"] = {"weights": mx8}
    found["MXFP8"] = {"weights": mx8, "input_activations": {**mx8, "dynamic": True}}
    found["NVFP4A16"], found["MXFP4A16"] = {"weights": nv}, {"weights": mx}
    found["NVFP4"] = {"weights": nv, "input_activations": {**nv, "dynamic": "local"}}
    found["MXFP4"] = {"weights": mx, "input_activations": {**mx, "dynamic": True}}
    found["MXFP4XFP8"] = {"weights": mx, "input_activations": by_group}
    return found
