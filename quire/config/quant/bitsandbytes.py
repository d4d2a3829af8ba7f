"""Reads quant_method "bitsandbytes": NF4 and FP4 with a scale per block of 64, and LLM.int8().

Which layers have it is shown by their tensors (quire.weights.bitsandbytes_layout).

Source: https://huggingface.co/docs/transformers/quantization/bitsandbytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from quire.config.quant.facts import QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import Json, read_names, refuse_unknown, require_value
from quire.config.quant.held import LEAST_GROUP, MatrixFacts, group_bits

KNOWN = frozenset(
    (
        *("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
        *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"),
        *("bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_skip_modules"),
        *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    )
)
Type = Literal["nf4", "fp4", "int8"]
BLOCK = 64
"""Weights that share a scale: neighbours of the flat matrix, so a block may cross rows."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(
    sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)
TABLES = {"nf4": NF4, "fp4": FP4}
"""Values of the 16 codes, by quant_type of bitsandbytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsAndBytesFormat(WeightFormat):
    """Codes of 4 bits with a table, or of 8 bits with a scale per output."""

    method: ClassVar[str] = "bitsandbytes"
    type: Type

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        outputs, inputs = matrix.tensor("bnb_codes").shape
        return outputs, inputs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        inputs = matrix.inputs
        if self.type == "int8":
            return group_bits(8, inputs, 32, inputs, device)
        group = math.gcd(BLOCK, inputs)
        return group_bits(4, group, 32, inputs, device) if group >= LEAST_GROUP else 16


def read(found: Json) -> QuantFacts:
    """Read the configuration. Raises ConfigError."""
    at = "quantization_config"
    refuse_unknown(at, found, KNOWN)
    four, eight = found.get("load_in_4bit", False), found.get("load_in_8bit", False)
    require_value(f"{at}.load_in_4bit", four, True, False)
    require_value(f"{at}.load_in_8bit", eight, not four)
    kind: Type = found.get("bnb_4bit_quant_type", "fp4") if four else "int8"
    require_value(f"{at}.bnb_4bit_quant_type", kind, *(("nf4", "fp4") if four else ("int8",)))
    return QuantFacts(
        quant_method="bitsandbytes",
        rules=unquantized(("lm_head", *read_names(found, "llm_int8_skip_modules"))),
        default=BitsAndBytesFormat(type=kind),
    )
