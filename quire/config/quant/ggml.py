"""Types of tensors in GGUF files: their blocks, and the format of a layer that has one.

Source: https://github.com/ggml-org/ggml/blob/master/include/ggml.h
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from quire.config.quant.facts import WeightFormat
from quire.config.quant.held import MatrixFacts, group_bits


class GgmlType(NamedTuple):
    """A type: each `nbytes` bytes of a row hold `values` values."""

    name: str
    values: int
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether values share bytes. False: numbers of a usual dtype."""
        return self.values > 1


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
}
"""Number in a file -> type."""

TYPE_BY_NAME = {one.name: one for one in GGML_TYPES.values()}

REFUSED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that ggml has removed, or that only its kernels use."""


HELD = {
    "Q4_0": (4, 32, 16),
    "Q4_1": (4, 32, 32),
    "Q5_0": (5, 32, 16),
    "Q5_1": (5, 32, 32),
    "Q8_0": (8, 32, 16),
    "Q2_K": (2, 16, 18),
    "Q3_K": (3, 16, 9),
    "Q4_K": (4, 32, 20),
    "Q5_K": (5, 32, 20),
    "Q6_K": (6, 16, 9),
    "IQ4_NL": (4, 32, 16),
    "IQ4_XS": (4, 32, 10),
    "TQ1_0": (2, 128, 16),
    "TQ2_0": (2, 128, 16),
    "MXFP4": (4, 32, 16),
    "NVFP4": (4, 16, 8),
    "Q1_0": (2, 128, 16),
    "Q2_0": (2, 64, 16),
}
"""Bits of a code in memory, inputs of a group, bits of the group's numbers: factors of K-quants in
bytes, and its share of float16 per block. Types that are not here are widened."""
WIDER_ON_CPU = {
    "Q2_K": 2 / 16,
    "Q3_K": 1 / 16,
    "Q4_K": 2 / 16,
    "Q5_K": 2 / 16,
    "Q6_K": 1 / 16,
    "IQ4_XS": 1 / 16,
    "NVFP4": 8 / 16,
}
"""Further bits per weight: numbers of a block of 256 in float32; of NVFP4, scales in float16."""


def held_bits(kind: str, inputs: int, device: str) -> float:
    """Return bits per weight of a type in the memory of a device: see quire.config.quant.held."""
    if kind not in HELD:
        return 16.0
    wider = WIDER_ON_CPU.get(kind, 0.0) if device == "cpu" else 0.0
    return group_bits(*HELD[kind], inputs, device) + wider


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlFormat(WeightFormat):
    """Blocks of one ggml type."""

    method: ClassVar[str] = "gguf"
    type: str  # a name in TYPE_BY_NAME

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        kind = TYPE_BY_NAME[self.type]
        *outputs, blocks, _ = max(matrix.tensors.values(), key=lambda one: one.nbytes).shape
        return math.prod(outputs), blocks * kind.values

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        return held_bits(self.type, matrix.inputs, device)
