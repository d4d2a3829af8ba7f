"""Reads the quantization that config.json describes, or that the user has chosen.

Tensors are handled by quire.quant. Two formats mean the same thing, e4m3
weights with float32 scales: quant_method "fp8" (DeepSeek, Qwen, transformers) and
"compressed-tensors" (llm-compressor). Everything else is refused by name.

Source: https://huggingface.co/docs/transformers/quantization/finegrained_fp8 and
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

Json = Mapping[str, Any]
BLOCK = 128
ONLINE_METHODS = {
    "fp8": 0,
    "fp8_per_channel": 0,
    "fp8_block": BLOCK,
    "fp8_per_block": BLOCK,
}
"""Values of `quantization` for a plain checkpoint -> inputs that share a scale; 0: a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFacts:
    """How the weights of linear layers are stored."""

    method: str  # a module of quire.quant
    quant_method: str  # quant_method of the checkpoint, or the value of the option
    block: int = 0  # side of the squares that share a scale; 0: one scale per output
    is_stored: bool = False  # stored in 8 bits with scales; otherwise quantized on load
    scale: str = "weight_scale"  # the scales' name beside `weight`
    static_activations: bool = (
        False  # the checkpoint fixed the scale of activations, as `input_scale`
    )
    skip: tuple[str, ...] = ()  # unquantized layers: runs of name components, or "re:" patterns

    def is_skipped(self, names: Iterable[str]) -> bool:
        """Whether a layer with any of these names stays unquantized."""
        return any(_matches(pattern, name) for pattern in self.skip for name in names)


def read_quantization(hf: Json, requested: str | None = None) -> QuantFacts | None:
    """Return the checkpoint's quantization, or the requested one; None: unquantized weights.

    Raises ConfigError for unsupported formats, and if the two disagree.
    """
    for key in ("quantization_config", "compression_config"):
        if hf.get(key):
            return reconcile_quantization(_read_checkpoint_quantization(hf[key], key), requested)
    return reconcile_quantization(None, requested)


def reconcile_quantization(found: QuantFacts | None, requested: str | None) -> QuantFacts | None:
    """Combine the checkpoint's quantization with the option."""
    if found is not None:
        if requested in (None, found.method, found.quant_method):
            return found
        raise ConfigError(
            f"quantization={requested!r}, but the checkpoint is already quantized "
            f"({found.quant_method}); leave quantization out"
        )
    if requested is None:
        return None
    if requested not in ONLINE_METHODS:
        known = ", ".join(ONLINE_METHODS)
        raise ConfigError(f"quantization must be one of {known}, got {requested!r}")
    return QuantFacts(method="fp8", quant_method=requested, block=ONLINE_METHODS[requested])


def _read_checkpoint_quantization(found: object, key: str) -> QuantFacts | None:
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: {key} is {found!r}; it must be an object")
    dialect = found.get("quant_method", "unnamed")
    if dialect == "mxfp4":
        return None  # its tensors show it (quire.quant.mxfp4)
    reader = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}.get(dialect)
    if reader is None:
        raise ConfigError(
            f"config.json: {key} has the quantization method {dialect!r}; supported: "
            "unquantized checkpoints, fp8, compressed-tensors with 8-bit floats, and mxfp4"
        )
    return reader(found)


def _read_fp8(found: Json) -> QuantFacts:
    """Read quant_method "fp8"."""
    sides, scheme = found.get("weight_block_size"), found.get("activation_scheme", "dynamic")
    fmt = found.get("fmt", "e4m3")
    _require_value("quantization_config.fmt", fmt, "e4m3", "float8_e4m3fn")  # DeepSeek, MiniMax
    _require_value("quantization_config.weight_block_size", sides, None, [BLOCK, BLOCK])
    _require_value("quantization_config.activation_scheme", scheme, "dynamic", "static")
    if sides and scheme == "static":
        raise ConfigError(
            'config.json: quantization_config.activation_scheme is "static"; with '
            'weight_block_size it must be "dynamic"'
        )
    return QuantFacts(
        method="fp8",
        quant_method="fp8",
        block=BLOCK if sides else 0,
        is_stored=True,
        scale="weight_scale_inv" if sides else "weight_scale",
        static_activations=scheme == "static",
        skip=_read_skip_names(found, "modules_to_not_convert")
        + _read_skip_names(found, "ignored_layers"),
    )


def _read_compressed_tensors(found: Json) -> QuantFacts:
    """Read quant_method "compressed-tensors", one group of w8a8 floats."""
    at = "quantization_config"
    groups = found.get("config_groups") or {}
    if len(groups) != 1 or found.get("sparsity_config") or found.get("transform_config"):
        raise ConfigError(
            f"config.json: {at} must have one entry in config_groups and no sparsity or "
            f"transforms; it has {len(groups)}: {', '.join(groups)}"
        )
    ((name, group),) = groups.items()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    _require_value(f"{at}.config_groups.{name}.targets", group.get("targets"), ["Linear"])
    for what, args in (("weights", weights), ("input_activations", inputs)):
        where = f"{at}.config_groups.{name}.{what}"
        _require_value(f"{where}.num_bits", args.get("num_bits"), 8)
        _require_value(f"{where}.type", args.get("type"), "float")
        _require_value(f"{where}.symmetric", args.get("symmetric", True), True)
    where = f"{at}.config_groups.{name}"
    strategy = weights.get("strategy")
    _require_value(f"{where}.weights.strategy", strategy, "channel", "tensor", "block")
    by_block, static = strategy == "block", not inputs.get("dynamic", False)
    if by_block:
        _require_value(
            f"{where}.weights.block_structure", weights.get("block_structure"), [BLOCK, BLOCK]
        )
        _require_value(f"{where}.input_activations.group_size", inputs.get("group_size"), BLOCK)
    given = inputs.get("strategy")
    allowed = "group" if by_block else "tensor" if static else "token"
    _require_value(f"{where}.input_activations.strategy", given, allowed)
    return QuantFacts(
        method="fp8",
        quant_method="compressed-tensors",
        block=BLOCK if by_block else 0,
        is_stored=True,
        static_activations=static,
        skip=_read_skip_names(found, "ignore"),
    )


_WILDCARD = re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
MAX_WILDCARDS = 3
MAX_PATTERN_LENGTH = 256


def _require_value(key: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        options = " or ".join(repr(one) for one in allowed)
        raise ConfigError(f"config.json: {key} is {value!r}; supported: {options}")


def _read_skip_names(found: Json, key: str) -> tuple[str, ...]:
    names = tuple(str(one) for one in found.get(key) or ())
    for name in names:
        if name.startswith("re:"):
            _check_pattern(name[3:], key)
    return names


def _check_pattern(pattern: str, key: str) -> None:
    """Raise ConfigError for a pattern that may match for ever: the file is untrusted."""
    wild = len(_WILDCARD.findall(pattern))
    if wild > MAX_WILDCARDS or _REPEATED_GROUP.search(pattern) or len(pattern) > MAX_PATTERN_LENGTH:
        why = (
            f"at most {MAX_WILDCARDS} of * + {{, none behind a group, "
            f"{MAX_PATTERN_LENGTH} characters"
        )
        raise ConfigError(f"config.json: {key} has the pattern {pattern!r:.80}; allowed: {why}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"config.json: {key} has the pattern {pattern!r:.80}: {error}") from None


def _matches(pattern: str, name: str) -> bool:
    """Match a name: a pattern is a run of whole components, or "re:" and a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."
