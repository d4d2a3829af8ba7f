"""Quantizes to integers of few bits with a scale per group, as compressed-tensors stores them.

    w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]

A group's range is clipped where that leaves less squared error, and the scale is then the best one
for the codes. Axes: O outputs, I inputs, G groups of g inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.search import as_stored, divide, row_chunks

CLIPS = {
    2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    3: (1.0, 0.9, 0.8, 0.7, 0.6),
    4: (1.0, 0.92, 0.84, 0.76),
    5: (1.0, 0.93, 0.86),
    6: (1.0, 0.95),
}
"""Bits -> shares of the full range that are tried; with more bits clipping gains nothing."""


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> WeightCodes:
    """Eight bits, one scale per output. weight: [O, I] float32."""
    return quantize_integers(weight, bits=8, group=0, symmetric=True, scale_dtype=scale_dtype)


def quantize_integers(
    weight: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    clip: bool = True,
) -> WeightCodes:
    """Round to nearest with the best clip of each group.

    weight: [O, I] float32. group: inputs that share a scale, a divisor of I; 0: all. importance:
    float32 [I], how much the squared error of each input counts. clip: False takes the full range.
    """
    outputs, inputs = weight.shape
    group = group or inputs
    q = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for rows in row_chunks(outputs, inputs, weight.device):
        part = weight[rows].float()
        scale, zero = group_factors(
            part, bits, group, symmetric, scale_dtype, importance, clip=clip
        )
        q[rows] = round_to_codes(part, scale, zero, bits)
        scales.append(scale.to(scale_dtype))
        zeros.append(zero.to(torch.uint8))
    return WeightCodes(
        q=q,
        bits=bits,
        group=group,
        scale=GroupFactors(torch.cat(scales)),
        zero=1 << bits - 1 if symmetric else torch.cat(zeros),
    )


def group_factors(
    weight: Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
    *,
    clip: bool = True,
) -> tuple[Tensor, Tensor]:
    """(scale, zero) of every group, float32 [O, G] each, with the least squared error.

    The scale is a number of scale_dtype; symmetric: it is negative where the largest magnitude is
    positive, as there is one more code below zero. zero: an integer in [0, 2 ** bits).
    """
    stored, top = as_stored(scale_dtype), (1 << bits) - 1
    x = weight.unflatten(-1, (-1, group))  # [O, G, g]
    weights = None if importance is None else importance.unflatten(-1, (-1, group))
    low, high = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
    middle = float(1 << bits - 1)
    extreme = torch.where(-low >= high, low, high)
    best_scale, best_zero = torch.ones_like(high), torch.full_like(high, middle)
    most = torch.full_like(high, -torch.inf)
    for ratio in CLIPS.get(bits, (1.0,)):
        zero: float | Tensor = middle
        if symmetric:
            scale = extreme * (-ratio / middle)
        else:
            scale = (high - low) * (ratio / top)
            zero = divide(-low * ratio, scale).round().clamp(0, top)
        codes = _centred_codes(x, scale, zero, top)
        weighted = codes if weights is None else codes * weights
        along, size = (weighted * x).sum(-1), weighted.mul_(codes).sum(-1)
        scale = stored(divide(along, size))
        gain = scale * (2 * along - scale * size)  # the squares of x less those of the error
        better = (gain > most) & (scale != 0)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        most = torch.where(better, gain, most)
    return best_scale, best_zero


def _centred_codes(x: Tensor, scale: Tensor, zero: float | Tensor, top: int) -> Tensor:
    """x / scale [O, G, g], rounded, from -zero to top - zero."""
    whole = (x * divide(torch.ones_like(scale), scale)[..., None]).round_()
    if isinstance(zero, Tensor):
        return whole.clamp_(-zero[..., None], top - zero[..., None])
    return whole.clamp_(-zero, top - zero)


def round_to_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The codes uint8 [O, I] of a weight with these factors [O, G]."""
    x = weight.unflatten(-1, (scale.shape[-1], -1))
    q = (x / scale[..., None]).round() + zero[..., None]
    return q.clamp(0, (1 << bits) - 1).flatten(-2).to(torch.uint8)
