"""Reads quant_method "fbgemm_fp8": e4m3 weights with a scale per output, rows quantized each.

`activation_scale_ub` bounds the magnitude that FBGEMM's kernel gives to a row's scale. Here the
scale is that of the row's largest number, so numbers beyond the bound are not cut off.

Source: https://huggingface.co/docs/transformers/quantization/fbgemm_fp8
"""

from __future__ import annotations

from quire.config.quant.facts import QuantFacts, unquantized
from quire.config.quant.fields import Json, read_names, refuse_unknown
from quire.config.quant.fp8 import Fp8Format

FIELDS = frozenset(("quant_method", "activation_scale_ub", "modules_to_not_convert"))


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    refuse_unknown("quantization_config", found, FIELDS)
    skip = ("lm_head", *read_names(found, "modules_to_not_convert"))
    return QuantFacts(quant_method="fbgemm_fp8", rules=unquantized(skip), default=Fp8Format())
