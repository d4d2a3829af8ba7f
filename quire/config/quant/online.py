"""Formats that a plain checkpoint is quantized to while it is loaded: `--quantization NAME`.

A group is 128 inputs; where 128 does not divide the inputs of a layer it is 64, 32 or 16, else
their largest divisor of that order, else the row. Scales are bfloat16: they have the range of the
weights, and codes are chosen for the rounded scale. NF4 has the float32 scales of bitsandbytes,
MXFP4 powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from quire.config.quant import ggml_online
from quire.config.quant.facts import QuantFacts, WeightFormat
from quire.config.quant.fp8 import BLOCK, Fp8Format
from quire.config.quant.held import LEAST_GROUP, MatrixFacts, group_bits

GROUP = 128
GROUPS = (128, 64, 32, 16)
"""Sizes of groups that kernels are made for."""
WITH_HEAD = "+lm_head"
"""Ends values of `quantization` that quantize the output head too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFormat(WeightFormat):
    """Codes of a few bits with a scale per group, made of a layer's weight when it has loaded."""

    method: ClassVar[str] = "online"
    is_stored: bool = False
    bits: int
    values: Literal["int", "nf4", "mxfp4"] = "int"
    """Values of codes: integers around a zero, the 16 of NF4, or those of e2m1 floats."""
    group: int = GROUP  # most inputs that share a scale; 0: a row
    symmetric: bool = True  # False: each group has its own code of zero

    def held_bits(self, matrix: MatrixFacts, device: str) -> float | None:
        group = self.group_of(matrix.inputs)
        if group is None:
            return None
        numbers = (32 if self.values == "nf4" else 16) + 8 * (not self.symmetric)
        return group_bits(self.bits, group, numbers, matrix.inputs, device)

    def group_of(self, inputs: int) -> int | None:
        """Return how many inputs of a matrix share a scale; None: it cannot have this format."""
        if self.values == "mxfp4":
            return None if inputs % self.group else self.group
        sizes = (*GROUPS, *range(self.group, LEAST_GROUP, -1))
        return next((one for one in sizes if one <= self.group and inputs % one == 0), inputs)


INT8 = OnlineFormat(bits=8)
NF4 = OnlineFormat(bits=4, values="nf4", group=64)
ONLINE_FORMATS: Mapping[str, WeightFormat] = {
    "fp8": Fp8Format(is_stored=False),
    "fp8_per_channel": Fp8Format(is_stored=False),
    "fp8_block": Fp8Format(is_stored=False, block=BLOCK),
    "fp8_per_block": Fp8Format(is_stored=False, block=BLOCK),
    "int8": INT8,
    "int8_per_channel_weight_only": OnlineFormat(bits=8, group=0),
    "experts_int8": OnlineFormat(bits=8, only_experts=True),
    "int4": OnlineFormat(bits=4),
    "int4_asym": OnlineFormat(bits=4, symmetric=False),
    "mxfp4": OnlineFormat(bits=4, values="mxfp4", group=32),
    "nf4": NF4,
    "bitsandbytes": NF4,
}
"""Values of `quantization` for a plain checkpoint -> what its linear layers become."""


def online_names() -> tuple[str, ...]:
    """Return the values of `quantization` that quantize a plain checkpoint."""
    return (*ONLINE_FORMATS, f"{ggml_online.PREFIX}NAME", f"any but fp8 with {WITH_HEAD} behind it")


def find_online(name: str, layers: int) -> QuantFacts | None:
    """Return what a value of `quantization` makes; None: no plain checkpoint is made so.

    layers: of the model. Raises ConfigError for an unknown mix of GGUF types.
    """
    plain = name.removesuffix(WITH_HEAD)
    head: WeightFormat | None = None
    if plain.startswith(ggml_online.PREFIX):
        found, head = ggml_online.read_mix(plain, layers), ggml_online.head_format(plain)
    elif (form := ONLINE_FORMATS.get(plain)) is None:
        return None
    else:
        found = QuantFacts(quant_method=plain, default=form)
        if isinstance(form, OnlineFormat):
            head = replace(form, only_experts=False)
    if plain == name:
        return found
    return None if head is None else replace(found, quant_method=name, head=head)
