"""Patches of images have the bits of the reference, and those are normalized pixel by pixel."""

import pytest
import torch

from quire.kernels.framework.op import OPS
from quire.kernels.normalized_patches import normalized_patches

OP = OPS["normalized_patches"]
SHAPES = [  # images, patch, depth, merge, cells down and across, pixels left over
    (3, 14, 1, 1, 2, 3, 5),
    (1, 7, 2, 2, 3, 1, 0),
    (4, 2, 2, 2, 1, 4, 3),
    (2, 1, 1, 3, 2, 2, 1),
]


def pixels_of(images, patch, merge, rows, columns, more):
    sides = [patch * merge * cells + more for cells in (rows, columns)]
    return torch.randint(0, 256, (images, *sides, 3), dtype=torch.uint8)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_reference(dtype, shape):
    images, patch, depth, merge, *size = shape
    pixels, scale_shift = pixels_of(images, patch, merge, *size), torch.randn(2, 3)
    for inside in (torch.float32, torch.bfloat16):
        how = (scale_shift, patch, dtype, depth, merge, inside)
        assert torch.equal(OP.native(pixels, *how), OP.reference(pixels, *how))


@pytest.mark.parametrize("inside", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_number_is_a_pixel_times_the_scale_and_the_shift(shape, inside):
    images, patch, depth, merge, rows, columns, more = shape
    pixels, scale_shift = pixels_of(images, patch, merge, rows, columns, more), torch.randn(2, 3)
    how = (patch, torch.float32, depth, merge, inside)
    found = iter(normalized_patches(pixels, scale_shift, *how))
    cell = torch.cartesian_prod(torch.arange(merge), torch.arange(merge)).tolist()
    for group in pixels.split(depth):
        values = (group * scale_shift[0]).to(inside) + scale_shift[1].to(inside)
        values = values.float().permute(3, 0, 1, 2)
        for row in range(0, rows * merge, merge):
            for column in range(0, columns * merge, merge):
                for down, across in cell:
                    y, x = (row + down) * patch, (column + across) * patch
                    want = values[:, :, y : y + patch, x : x + patch].expand(-1, depth, -1, -1)
                    assert torch.equal(next(found), want.flatten())
    assert next(found, None) is None


@pytest.mark.usefixtures("native")
def test_what_the_kernel_does_not_read_is_left_to_the_reference():
    scale_shift = torch.ones(2, 3)
    whole = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    for pixels in (whole.float(), whole.swapaxes(1, 2), whole[:, :, ::2], whole[..., :1]):
        own = scale_shift[:, : pixels.shape[3]]
        assert OP.native(pixels, own, 4, torch.float32) is NotImplemented
        want = OP.reference(pixels.clone(), own, 4, torch.float32)
        assert torch.equal(normalized_patches(pixels.clone(), own, 4, torch.float32), want)
