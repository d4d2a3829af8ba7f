"""Reads quant_method "fp8" (DeepSeek, Qwen, transformers): e4m3 weights with float32 scales.

Source: https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import Json, read_names, refuse_unknown, require_value
from quire.config.quant.held import BEFORE_FP8, MatrixFacts, group_bits
from quire.errors import ConfigError

BLOCK = 128
FIELDS = frozenset(
    (
        *("quant_method", "activation_scheme", "weight_block_size", "fmt", "dequantize"),
        *("modules_to_not_convert", "ignored_layers", "modules_to_convert", "expert_dtype"),
        *("scale_fmt", "kv_cache_scheme"),  # how scales were rounded; its scales are tensors
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format(WeightFormat):
    """e4m3 numbers with float32 scales."""

    method: ClassVar[str] = "fp8"
    block: int = 0  # side of the squares that share a scale; 0: one scale per output
    scale: str = "weight_scale"  # the scales' name beside `weight`
    static_activations: bool = False
    """The checkpoint fixed the scale of activations, as `input_scale`."""

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        if device != BEFORE_FP8:
            return 8 + 32 / (self.block * self.block or matrix.inputs)
        return group_bits(8, self.block or matrix.inputs, 32, matrix.inputs, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8WeightOnlyFormat(WeightFormat):
    """e4m3 numbers with scales, for activations that stay in 16 bits."""

    method: ClassVar[str] = "fp8_weight_only"
    rows: int = 1  # outputs that share a scale
    group: int | None = None  # inputs that share a scale; None: all of them
    powers: bool = False  # scales are e8m0: the exponents of powers of two

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        scale = 16 if self.powers else matrix.float_bits("weight_scale")
        group = self.group or matrix.inputs  # each output has its own scales
        return group_bits(8, group, scale, matrix.inputs, device)


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, FIELDS)
    require_value(f"{at}.modules_to_convert", found.get("modules_to_convert"), None)
    require_value(f"{at}.expert_dtype", found.get("expert_dtype", "fp8"), "fp8")
    require_value(f"{at}.scale_fmt", found.get("scale_fmt"), None, "float", "ue8m0")
    sides, scheme = found.get("weight_block_size"), found.get("activation_scheme", "dynamic")
    fmt = found.get("fmt", "e4m3")
    require_value(f"{at}.fmt", fmt, "e4m3", "float8_e4m3fn")  # DeepSeek, MiniMax
    require_value(f"{at}.weight_block_size", sides, None, [BLOCK, BLOCK])
    require_value(f"{at}.activation_scheme", scheme, "dynamic", "static")
    if sides and scheme == "static":
        raise ConfigError(
            'config.json: quantization_config.activation_scheme is "static"; with '
            'weight_block_size it must be "dynamic"'
        )
    named = read_names(found, "modules_to_not_convert") + read_names(found, "ignored_layers")
    skip = ("lm_head", *named)  # these writers leave the head out without naming it
    stored = Fp8Format(
        block=BLOCK if sides else 0,
        scale="weight_scale_inv" if sides else "weight_scale",
        static_activations=scheme == "static",
    )
    return QuantFacts(quant_method="fp8", rules=unquantized(skip), default=stored)
