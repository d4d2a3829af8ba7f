"""Four-bit floats (e2m1), two a byte, and powers of two in a byte (e8m0).

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.grouped_weight import unpack_plane
from quire.weights.mapping import InitSpec

BITS = 4
CODES_INIT = InitSpec(127.0, 30.0)
"""Of dummy bytes."""
E8M0_BIAS = 127
_LEAST, _NAN = 0x0040, 0x7FC0
"""The bits of 2 ** -127, which is subnormal, and of NaN in bfloat16."""


def unpack_pairs(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> codes [..., 2n], the low half of each byte first."""
    return unpack_plane(packed, BITS)


def e8m0_to_bfloat16(powers: Tensor) -> Tensor:
    """uint8 exponents -> 2 ** (exponent - 127), exact; 255 is NaN."""
    wide = powers.short()
    bits = torch.where(wide == 0, _LEAST, torch.where(wide == 255, _NAN, wide << 7))
    return bits.to(torch.int16).view(torch.bfloat16)
