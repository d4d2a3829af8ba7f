"""Quantizes to integers of few bits with a scale per group, as compressed-tensors stores them.

    w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g]

A group's range is clipped where that leaves less squared error. Axes: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.weight_codes import GroupFactors, WeightCodes
from quire.kernels.quantizers.search import as_stored, divide, row_chunks, weighted_error


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> WeightCodes:
    """Eight bits, one scale per output. weight: [O, I] float32."""
    return quantize_integers(weight, bits=8, group=0, symmetric=True, scale_dtype=scale_dtype)


def quantize_int4(
    weight: Tensor, group: int = 128, scale_dtype: torch.dtype = torch.bfloat16
) -> WeightCodes:
    """Four bits, one scale per output and `group` inputs. weight: [O, I] float32."""
    return quantize_integers(weight, bits=4, group=group, symmetric=True, scale_dtype=scale_dtype)


def quantize_integers(
    weight: Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> WeightCodes:
    """Round to nearest with the best clip of each group.

    weight: [O, I] float32. group: inputs that share a scale, a divisor of I; 0: all. importance:
    float32 [I], how much the squared error of each input counts.
    """
    outputs, inputs = weight.shape
    group = group or inputs
    q = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for rows in row_chunks(outputs, inputs):
        part = weight[rows].float()
        scale, zero = group_factors(part, bits, group, symmetric, scale_dtype, importance)
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
) -> tuple[Tensor, Tensor]:
    """(scale, zero) of every group, float32 [O, G] each, with the least squared error.

    The scale is a number of scale_dtype. zero: an integer in [0, 2 ** bits).
    """
    stored, top = as_stored(scale_dtype), (1 << bits) - 1
    x = weight.unflatten(-1, (-1, group))  # [O, G, g]
    weights = None if importance is None else importance.unflatten(-1, (-1, group))
    low, high = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best_scale, best_zero = torch.zeros_like(high), torch.zeros_like(high)
    least = torch.full_like(high, torch.inf)
    for ratio in _clips(bits):
        scale = stored((high - low) * (ratio / top))
        scale = torch.where(scale == 0, stored(torch.ones_like(scale)), scale)
        if symmetric:
            zero = torch.full_like(scale, float(1 << bits - 1))
        else:
            zero = divide(-low * ratio, scale).round().clamp(0, top)
        q = (x / scale[..., None]).round().add(zero[..., None]).clamp(0, top)
        error = weighted_error(x, (q - zero[..., None]) * scale[..., None], weights)
        better = error < least
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
        least = torch.where(better, error, least)
    return best_scale, best_zero


def round_to_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The codes uint8 [O, I] of a weight with these factors [O, G]."""
    x = weight.unflatten(-1, (scale.shape[-1], -1))
    q = (x / scale[..., None]).round() + zero[..., None]
    return q.clamp(0, (1 << bits) - 1).flatten(-2).to(torch.uint8)


def _clips(bits: int) -> list[float]:
    """Shares of the full range that are tried."""
    span, steps = {2: (0.6, 24), 3: (0.5, 24), 4: (0.4, 20)}.get(bits, (0.1, 10))
    least = [1.0 - span * i / steps for i in range(steps)]
    return [1.0 + 1.0 / ((1 << bits) - 2), *least]  # first: both ends of a symmetric range
