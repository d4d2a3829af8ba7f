"""Reads quant_method "squeezellm": codes into a table of each output, and outliers.

Source: https://github.com/SqueezeAILab/SqueezeLLM, https://arxiv.org/abs/2306.07629
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import QuantFacts, WeightFormat
from quire.config.quant.fields import Json, refuse_unknown, require_value
from quire.config.quant.held import MatrixFacts, group_bits

_KNOWN = frozenset({"quant_method", "wbits", "bits", "include_sparse", "topX", "balanced"})

OUTLIER_BITS = 64 + 64 + 32
"""Of an outlier in memory: its output, its input and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeFormat(WeightFormat):
    """Codes in int32 words, a table of values per output, and sparse values that are added."""

    method: ClassVar[str] = "squeezellm"
    bits: int

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        words, outputs = matrix.tensor("qweight").shape
        return outputs, words * 32 // self.bits

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        count = matrix.outputs * matrix.inputs
        added = sum(
            math.prod(matrix.tensor(name).shape)
            for name in ("vals", "full_rows")
            if matrix.has(name)
        )
        more = added * OUTLIER_BITS / max(count, 1)
        if device == "cpu":
            return self.bits + (32 << self.bits) / matrix.inputs + more
        table = 16 * (32 + 16)  # float32, and the words that kernels pick from
        return group_bits(4, matrix.inputs, table, matrix.inputs, device) + more


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, _KNOWN)
    key = "wbits" if "wbits" in found else "bits"
    require_value(f"{at}.{key}", found.get(key), 3, 4)
    return QuantFacts(quant_method="squeezellm", default=SqueezeFormat(bits=int(found[key])))
