"""Fields of a few bits in 32-bit words, as checkpoints pack them, to one byte each.

Axes: N fields of a row.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from quire.kernels.formats.grouped_weight import unpack_plane
from quire.kernels.formats.weight_codes import GroupFactors


def fields_per_word(bits: int, dense: bool) -> Fraction:
    """How many fields a word has. dense: fields may cross words, else bits at its end are left."""
    return Fraction(32, bits) if dense else Fraction(32 // bits)


def unpack_words(words: Tensor, bits: int, count: int, *, dense: bool = True) -> Tensor:
    """int32 [..., words] -> uint8 [..., N = count], from the lowest bits of the first word on."""
    if not dense and 32 % bits:
        shifts = range(0, 32 // bits * bits, bits)
        fields = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
        return torch.stack(fields, -1).flatten(-2)[..., :count]
    # an axis of one counts as contiguous whatever its stride, but not for a view of bytes
    packed = words.contiguous().flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    if 8 % bits == 0:
        return unpack_plane(packed, bits)[..., :count]
    # eight fields are as many bytes as a field has bits, and fit an int64
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    runs = packed.unflatten(-1, (-1, bits))
    joined = runs[..., 0].long()
    for i in range(1, bits):
        joined |= runs[..., i].long() << 8 * i
    fields = [(joined >> at * bits & (1 << bits) - 1).to(torch.uint8) for at in range(8)]
    return torch.stack(fields, -1).flatten(-2)[..., :count]


def unpack_rows(words: Tensor, bits: int, count: int, *, dense: bool = True) -> Tensor:
    """The same of words packed along the axis before the last: [..., words, n] -> [..., N, n]."""
    return unpack_words(words.transpose(-1, -2), bits, count, dense=dense).transpose(-1, -2)


def factors(values: Tensor) -> GroupFactors:
    """Float32 factors in 16 bits if that loses nothing."""
    if not values.is_meta:
        for dtype in (torch.float16, torch.bfloat16):
            narrow = values.to(dtype)
            if torch.equal(narrow.float(), values):
                return GroupFactors(narrow)
    return GroupFactors(values.to(torch.float16) if values.is_meta else values)
