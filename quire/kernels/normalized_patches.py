"""Normalized patches: bytes of images as float32, a scale and a shift for each channel, in patches.

Axes: N images, H x W pixels, C channels, P patches of all images
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.framework.op import op
from quire.kernels.native.library import PATCHES, NativeOp, empty


def _cases(device: torch.device) -> Iterator[dict[str, Any]]:
    for shape, patch, depth, merge, dtype in [
        ((2, 28, 42, 3), 14, 1, 1, torch.float32),
        ((3, 19, 33, 3), 4, 1, 2, torch.bfloat16),
        ((4, 45, 30, 3), 5, 2, 2, torch.float16),
        ((1, 64, 96, 3), 16, 2, 2, torch.float32),
    ]:
        images, height, width, channels = shape
        whole = torch.randint(0, 256, (images, height + 3, width + 5, channels), dtype=torch.uint8)
        yield {
            "pixels": whole.to(device)[:, :height, 2 : 2 + width],
            "scale_shift": torch.randn(2, channels, device=device),
            "patch": patch,
            "dtype": dtype,
            "depth": depth,
            "merge": merge,
            "inside": torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        }


def _normalized(x: Tensor, scale_shift: Tensor, dtype: torch.dtype, inside: torch.dtype) -> Tensor:
    """x [..., C, n] * scale + shift, in place if x is float32."""
    scale, shift = scale_shift[..., None]
    return x.float().mul_(scale).to(inside).add_(shift.to(inside)).to(dtype)


_run = NativeOp(PATCHES, "q" * 13)


def _native(
    pixels: Tensor,
    scale_shift: Tensor,
    patch: int,
    dtype: torch.dtype,
    depth: int = 1,
    merge: int = 1,
    inside: torch.dtype = torch.float32,
) -> Tensor:
    count, height, width, channels = pixels.shape
    frames, cell = depth if count > 1 else 1, patch * merge
    layout = channels, *pixels.stride()[2:]
    if pixels.dtype != torch.uint8 or layout != (3, 3, 1) or count % frames:
        return NotImplemented
    # Every number that there can be.
    levels = _normalized(torch.arange(256).expand(channels, -1), scale_shift, dtype, inside)
    images, rows, columns = count // frames, height // cell * merge, width // cell * merge
    image, row = pixels.stride()[:2]
    found = empty((images * rows * columns, channels * depth * patch * patch), dtype)
    _run(
        pixels.data_ptr(), frames * image, image if frames > 1 else 0, row, levels.data_ptr(),
        found.data_ptr(), images, rows, columns, depth, patch, merge, dtype.itemsize,
    )  # fmt: skip
    return found


@op(cases=_cases, native=_native)
def normalized_patches(
    pixels: Tensor,
    scale_shift: Tensor,
    patch: int,
    dtype: torch.dtype,
    depth: int = 1,
    merge: int = 1,
    inside: torch.dtype = torch.float32,
) -> Tensor:
    """Cut images into patches and normalize them: x * scale + shift of each channel.

    pixels: uint8 [N, H, W, C], or such numbers as float32, which may be overwritten. depth: images
    that a patch spans, of which there are whole groups, or one, which fills all of a patch. merge:
    patches come in the order of cells of merge x merge of them, and pixels beyond the last whole
    cell are left out. scale_shift: float32 [2, C]. inside: the dtype that products and sums are
    rounded to.

    Returns [P, C * depth * patch * patch], row by row of each image.
    """
    count, height, width, channels = pixels.shape
    frames, cell = depth if count > 1 else 1, patch * merge
    rows, columns = height // cell, width // cell
    cut = pixels[:, : rows * cell, : columns * cell]
    cut = cut.reshape(count // frames, frames, rows, merge, patch, columns, merge, patch, channels)
    cut = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # cells, their patches, [C, frames, patch, patch]
    # Bytes are reordered, then whole rows are read.
    x = _normalized(cut.reshape(-1, channels, frames * patch**2), scale_shift, dtype, inside)
    x = x.view(-1, channels, frames, patch**2).expand(-1, -1, depth, -1)
    return x.reshape(-1, channels * depth * patch**2)
