"""Resizes frames on a device: bicubic, antialiased, with the whole numbers that a CPU computes.

torch resizes bytes on a CPU with weights of 16 bits, and rounds to bytes between columns and rows;
torchvision and the fast processors of models use that. On a GPU torch resizes floats only, and
rounds once: some levels differ by one. Here both passes are products with the CPU's weights, which
are cut into two parts of 8 bits: every sum is exact, whatever precision a product of floats has.

Axes: F frames, H x W pixels, C channels, n sizes before, m sizes after, K taps of a place
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from quire.sampling.h2d import to_device

MOST_PRECISION = 22
WEIGHT_BITS = 15
"""The largest weight has one bit less, at least, than this; the sign is beyond."""
FLOAT_PRECISION = 15
"""Bits of sums that float32 adds exactly: 255 times the sizes of all weights has 24 bits then."""
KEPT_WEIGHTS, KEPT_MATRICES = 1 << 19, 4
"""Of a matrix that is kept on the device, and matrices: 16 MiB in all."""


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize frames [F, H, W, C] of bytes to whole numbers in [0, 255]: [F, height, width, C]."""
    if pixels.shape[1:3] == (height, width):
        return pixels
    if pixels.device.type == "cpu":
        images = pixels.permute(0, 3, 1, 2)
        made = functional.interpolate(images, (height, width), mode="bicubic", antialias=True)
        return made.permute(0, 2, 3, 1)
    return resized_by_products(pixels, height, width)


def resized_by_products(pixels: Tensor, height: int, width: int) -> Tensor:
    """What resized() returns, by products of matrices, in float32."""
    images = pixels.permute(0, 3, 1, 2)  # [F, C, H, W]
    if images.shape[3] != width:
        images = _resized_last(images, width)
    if images.shape[2] != height:
        images = _resized_last(images.transpose(2, 3), height).transpose(2, 3)
    return images.permute(0, 2, 3, 1)


def _resized_last(images: Tensor, size: int) -> Tensor:
    """Resize the last axis: [..., n] -> [..., m], float32."""
    before = images.shape[3]
    matrix, precision = _matrix_of(before, size, images.device)
    rows = images.reshape(-1, before).to(torch.float32)
    high, low = (rows @ matrix).split(size, 1)
    if precision <= FLOAT_PRECISION:
        made = torch.add(high, low).add_(0.5).floor_().clamp_(0, 255)
    else:
        sums = high.to(torch.int32).mul_(256).add_(low.to(torch.int32)).add_(1 << (precision - 1))
        made = (sums >> precision).clamp_(0, 255).to(torch.float32)
    return made.view(*images.shape[:3], size)


def _matrix_of(before: int, size: int, device: torch.device) -> tuple[Tensor, int]:
    """_new_matrix(); small ones of the last sizes are kept: launches of it take longer than the
    rest."""
    small = before * size <= KEPT_WEIGHTS
    return (_kept_matrix if small else _new_matrix)(before, size, device)


def _new_matrix(before: int, size: int, device: torch.device) -> tuple[Tensor, int]:
    """The parts of weights side by side: float32 [n, 2 m], and the bits of their sums.

    With FLOAT_PRECISION or fewer the parts add up to the weights themselves; with more, the first
    is to be multiplied by 256, and the sum divided by 2 ** bits, in whole numbers.
    """
    first, weights, precision = taps(before, size)
    starts = to_device(first, device)
    parts = _halves(weights)  # [2, m, K]
    if precision <= FLOAT_PRECISION:
        parts *= np.array([256, 1], np.float32)[:, None, None] / (1 << precision)
    places = starts[:, None] + torch.arange(weights.shape[1], device=device)
    matrix = torch.zeros((2, size, before + weights.shape[1]), device=device)
    matrix.scatter_(2, places.expand(2, -1, -1), to_device(parts, device))
    return matrix[:, :, :before].permute(2, 0, 1).reshape(before, 2 * size), precision


_kept_matrix = functools.lru_cache(KEPT_MATRICES)(_new_matrix)


def _halves(weights: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Numbers that make weights as 256 * first + second, the second in [0, 255]."""
    return np.stack([weights >> 8, weights & 255]).astype(np.float32)


@functools.lru_cache(64)
def taps(before: int, after: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], int]:
    """Where the K neighbours of each place begin, their whole weights [after, K], and their bits.

    Weights are those that torch computes on a CPU, times 2 ** bits.
    """
    scale = before / after
    support = 2.0 * max(scale, 1.0)
    count = math.ceil(support) * 2 + 1
    center = scale * (np.arange(after) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    end = np.minimum((center + support + 0.5).astype(np.int64), before)
    at = first[:, None] + np.arange(count)
    distance = np.abs((at - center[:, None] + 0.5) * (1.0 / max(scale, 1.0)))
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * -0.5
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    weights = np.where(at < end[:, None], weights, 0.0)
    weights /= weights.sum(1, keepdims=True)
    precision = 0
    while precision < MOST_PRECISION:
        if int(0.5 + weights.max() * (1 << (precision + 1))) >= 1 << WEIGHT_BITS:
            break
        precision += 1
    whole = np.trunc(weights * (1 << precision) + np.where(weights < 0, -0.5, 0.5))
    return first, whole.astype(np.int32), precision
