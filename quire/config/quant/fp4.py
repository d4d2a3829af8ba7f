"""Weights in four-bit floats (e2m1) with a scale per 16 or 32 inputs: NVFP4 and MXFP4.

Activations stay in 16 bits, also where a checkpoint was made for activations in four: no kernel
multiplies two such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.config.quant.facts import QuantFacts, WeightFormat, unquantized
from quire.config.quant.fields import read_names, refuse_unknown
from quire.config.quant.held import MatrixFacts, group_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class NvFp4Format(WeightFormat):
    """e2m1 codes, an e4m3 scale per 16 inputs, and one float32 scale per tensor.

    input_scale: the scale of activations that the checkpoint has beside them; it is not used.
    """

    method: ClassVar[str] = "nvfp4"
    codes: str = "weight_packed"
    global_scale: str = "weight_global_scale"
    divides: bool = True  # the scale of a tensor; False: it multiplies
    input_scale: str | None = None

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        *outputs, pairs = matrix.tensor(self.codes).shape
        return math.prod(outputs), 2 * pairs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        scale = 16 if device == "cpu" else 8
        bits = group_bits(4, 16, scale, matrix.inputs, device)
        return bits + 32 / matrix.inputs  # the tensor's, for each output


@dataclass(frozen=True, slots=True, kw_only=True)
class MxFp4Format(WeightFormat):
    """e2m1 codes and a power of two per 32 inputs."""

    method: ClassVar[str] = "mxfp4"
    codes: str = "weight_packed"
    scale: str = "weight_scale"
    block_axis: bool = False  # codes are [O, I / 32, 16], as in GPT-OSS, not [O, I / 2]

    def stored_size(self, matrix: MatrixFacts) -> tuple[int, int]:
        *outputs, inputs = matrix.tensor(self.codes).shape
        if self.block_axis:
            *outputs, inputs = (*outputs[:-1], outputs[-1] * inputs)
        return math.prod(outputs), 2 * inputs

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        return group_bits(4, 32, 16, matrix.inputs, device)


GPT_OSS = MxFp4Format(codes="blocks", scale="scales", block_axis=True, only_experts=True)


def read_mxfp4(found: Mapping[str, Any]) -> QuantFacts:
    """Read quant_method "mxfp4", of GPT-OSS. Raises ConfigError."""
    known = frozenset(("quant_method", "modules_to_not_convert", "dequantize"))
    refuse_unknown("quantization_config", found, known)
    return QuantFacts(
        quant_method="mxfp4",
        rules=unquantized(read_names(found, "modules_to_not_convert")),
        default=GPT_OSS,
    )
