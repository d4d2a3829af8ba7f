"""Pixel operations that media processors share. Arrays are [height, width, 3] in uint8.

Resizing is PIL's, antialiased, on 8-bit channels: what the image processors without torchvision do.
The native library has the same pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from quire.core.types import MediaTensor
from quire.media.native import library
from quire.media.processor import Pixels

BICUBIC = int(Image.Resampling.BICUBIC)
BILINEAR = int(Image.Resampling.BILINEAR)


def resize(pixels: Pixels, height: int, width: int, resample: int = BICUBIC) -> Pixels:
    """Resize to [height, width, 3]. resample: PIL's number of the filter, as in config files."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if (made := library.resize(pixels, height, width, resample)) is not None:
        return made
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(image)


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return (height, width) at which the shorter side has `edge` pixels."""
    if height <= width:
        return edge, int(edge * width / height)
    return int(edge * height / width), edge


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """Cut the middle out; what is outside of the image is black."""
    top = (pixels.shape[0] - height) // 2
    left = (pixels.shape[1] - width) // 2
    if top < 0 or left < 0:
        tall, wide = max(height, pixels.shape[0]), max(width, pixels.shape[1])
        # A missing odd pixel goes to the top and to the left, as in transformers.
        above = -(-(tall - pixels.shape[0]) // 2)
        before = -(-(wide - pixels.shape[1]) // 2)
        pixels = pad(pixels, tall, wide, top=above, left=before)
        top, left = top + above, left + before
    return pixels[top : top + height, left : left + width]


def pad(
    pixels: Pixels,
    height: int,
    width: int,
    *,
    top: int = 0,
    left: int = 0,
    color: Sequence[int] = (0, 0, 0),
) -> Pixels:
    """Return an image of this size with the pixels at (top, left) and the rest in one color."""
    if pixels.shape[:2] == (height, width):
        return pixels
    bottom, right = top + pixels.shape[0], left + pixels.shape[1]
    line = np.empty((width, 3), np.uint8)
    line[:] = color
    out = np.empty((height, width, 3), np.uint8)
    out[:top], out[bottom:] = line, line
    out[top:bottom, :left], out[top:bottom, right:] = line[:left], line[right:]
    out[top:bottom, left:right] = pixels
    return out


def to_tensor(name: str, array: npt.NDArray[Any]) -> MediaTensor:
    """Pack an array for the encoder: C order, little-endian. It must not change afterwards."""
    array = np.asarray(array)
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    data = cast(bytes, little.reshape(-1).view(np.uint8).data)
    return MediaTensor(name, array.dtype.name, array.shape, data)


def from_tensor(tensor: MediaTensor) -> npt.NDArray[Any]:
    """Return the array of a packed tensor, read-only. bfloat16 has no NumPy type."""
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)
