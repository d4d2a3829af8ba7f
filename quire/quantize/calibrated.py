"""What calibration found for the matrices of one decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quire.kernels.formats.weight_codes import WeightCodes

GramKey = tuple[str, str, int]
"""SourceTensor.scale_group: matrices with equal ones have the same inputs."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Of one unit. All are empty without texts.

    grams: x.T @ x [I, I] float32 of the inputs x of matrices. made: matrices that are quantized
    already. changed: tensors that replace those of the source. errors: of what is made.
    """

    grams: Mapping[GramKey, Tensor] = field(default_factory=dict)
    made: Mapping[str, WeightCodes] = field(default_factory=dict)
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    errors: Mapping[str, dict[str, float]] = field(default_factory=dict)
