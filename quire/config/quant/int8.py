"""Weights in signed bytes that multiply activations in bytes (W8A8), however a writer names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.quant.facts import WeightFormat
from quire.config.quant.held import MatrixFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format(WeightFormat):
    """Bytes with one float32 scale per output or per tensor."""

    method: ClassVar[str] = "int8"
    symmetric_inputs: bool = True  # False: rows of activations have a zero point
    static_activations: bool = False
    """The checkpoint fixed the scale of activations, as `input_scale`, and `input_zero_point`."""
    extra_zeros: bool = False
    """The writer may leave zero points also where they are all zero."""

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        return 8 + (32 if self.symmetric_inputs else 64) / matrix.inputs  # and sums of rows
