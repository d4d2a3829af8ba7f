"""Reads quant_method "squeezellm": codes into a table of each output, and outliers.

Source: https://github.com/SqueezeAILab/SqueezeLLM, https://arxiv.org/abs/2306.07629
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import QuantFacts, WeightFormat
from quire.config.quant.fields import Json, refuse_unknown, require_value

_KNOWN = frozenset({"quant_method", "wbits", "bits", "include_sparse", "topX", "balanced"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeFormat(WeightFormat):
    """Codes in int32 words, a table of values per output, and sparse values that are added."""

    method: ClassVar[str] = "squeezellm"
    bits: int


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, _KNOWN)
    key = "wbits" if "wbits" in found else "bits"
    require_value(f"{at}.{key}", found.get(key), 3, 4)
    return QuantFacts(quant_method="squeezellm", default=SqueezeFormat(bits=int(found[key])))
