"""Reads quant_method "hqq" (HQQ through transformers): integers with float zeros.

Source: https://github.com/mobiusml/hqq, https://mobiusml.github.io/hqq_blog
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import LayerRule, QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import (
    Json,
    read_group_size,
    read_names,
    read_object,
    refuse_unknown,
    require_value,
)
from quire.config.quant.held import MatrixFacts, group_bits
from quire.errors import ConfigError

AT = "quantization_config"
FIELDS = frozenset({"quant_method", "quant_config", "skip_modules"})
LAYER_FIELDS = frozenset(
    (
        *("weight_quant_params", "scale_quant_params", "zero_quant_params", "offload_meta"),
        *("act_bits", "act_group_size", "trainable"),
    )
)
WEIGHT_FIELDS = frozenset(
    ("nbits", "channel_wise", "group_size", "optimize", "round_zero", "axis", "view_as_float")
)
FIELDS_PER_WORD = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Bits -> codes that share a word: 32 bits wide for 3 bits, else a byte."""
WHOLE_TILES = 512
"""Inputs of tiles without padding, whatever the bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HqqFormat(WeightFormat):
    """Codes that share words across the matrix; a scale and a float zero per output and group."""

    method: ClassVar[str] = "hqq"
    bits: int
    group: int | None  # inputs that share a scale; None: all of them

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        width = matrix.tensor("W_q").shape[-1]
        groups = math.prod(matrix.tensor("scale").shape)
        if self.group is None:
            return groups, width
        count = groups * self.group  # as if the matrix were a square: only its tensors state more
        inputs = -(-math.isqrt(count) // WHOLE_TILES) * WHOLE_TILES
        return count // inputs, inputs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        numbers = matrix.float_bits("scale") + 32  # and an offset
        group = self.group or matrix.inputs
        return group_bits(max(self.bits, 2), group, numbers, matrix.inputs, device)


def read(found: Json) -> QuantFacts:
    """Read the configuration: one for all layers, or one for each kind. Raises ConfigError."""
    refuse_unknown(AT, found, FIELDS)
    config = read_object(f"{AT}.quant_config", found.get("quant_config"))
    skipped = unquantized(read_names(found, "skip_modules"))
    if "weight_quant_params" in config:
        default = _format(f"{AT}.quant_config", config)
        return QuantFacts(quant_method="hqq", rules=skipped, default=default)
    if not config:
        raise ConfigError(f"config.json: {AT}.quant_config has no weight_quant_params")
    rules = tuple(  # self_attn.q_proj, for one; a layer that none names is unquantized
        LayerRule(tag, None if own is None else _format(f"{AT}.quant_config.{tag}", own))
        for tag, own in config.items()
    )
    return QuantFacts(quant_method="hqq", rules=skipped + rules, default=None)


def _format(at: str, stated: object) -> HqqFormat:
    layer = read_object(at, stated)
    refuse_unknown(at, layer, LAYER_FIELDS)
    require_value(f"{at}.act_bits", layer.get("act_bits"), None)
    at = f"{at}.weight_quant_params"
    weights = read_object(at, layer.get("weight_quant_params"))
    refuse_unknown(at, weights, WEIGHT_FIELDS)
    bits = weights.get("nbits")
    require_value(f"{at}.nbits", bits, *FIELDS_PER_WORD)
    require_value(f"{at}.channel_wise", weights.get("channel_wise", True), True)
    axis = weights.get("axis", 0)
    if type(axis) is not int or axis != 1:
        raise ConfigError(
            f"config.json: {at}.axis is {axis!r:.80}: groups across outputs, which no kernel of "
            "quire multiplies; supported: 1, as HqqConfig(axis=1) makes it"
        )
    group = read_group_size(f"{at}.group_size", weights.get("group_size"), None)
    return HqqFormat(bits=weights["nbits"], group=group)
