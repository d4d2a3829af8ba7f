"""Pixel operations, and the checks of processor options."""

import numpy as np
import pytest

from quire.errors import RequestError
from quire.media import image_ops
from quire.media.processor import PROCESSORS, KwargRange, MediaProcessor, ProcessorFiles

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("size", "crop", "expected"),
    [  # rows of what transformers' center_crop returns for one column of 1, 2, 3 ...
        (5, 2, [2, 3]),
        (5, 3, [2, 3, 4]),
        (3, 8, [0, 0, 0, 1, 2, 3, 0, 0]),
        (4, 9, [0, 0, 0, 1, 2, 3, 4, 0, 0]),
    ],
)
def test_crops_and_pads_as_transformers(size, crop, expected):
    pixels = np.zeros((size, 4, 3), np.uint8)
    pixels[:] = np.arange(1, size + 1).reshape(-1, 1, 1)
    cut = image_ops.center_crop(pixels, crop, 2)
    assert cut.shape == (crop, 2, 3)
    assert cut[:, 0, 0].tolist() == expected
    assert np.array_equal(image_ops.center_crop(pixels.swapaxes(0, 1), 2, crop), cut.swapaxes(0, 1))


@pytest.mark.parametrize("place", [(0, 0), (2, 3), (1, 0), (0, 4), (3, 2)])
def test_pads_around_an_image_in_one_color(place):
    pixels = RNG.integers(0, 256, (4, 5, 3), np.uint8)
    top, left = place
    expected = np.tile(np.array([1, 2, 3], np.uint8), (7, 9, 1))
    expected[top : top + 4, left : left + 5] = pixels
    found = image_ops.pad(pixels, 7, 9, top=top, left=left, color=(1, 2, 3))
    assert np.array_equal(found, expected)


def test_tensors_are_packed_and_read_back():
    array = RNG.integers(-9, 9, (2, 3)).astype(np.int32).T
    packed = image_ops.to_tensor("grid", array)
    assert (packed.dtype, packed.shape) == ("int32", (3, 2))
    assert np.array_equal(image_ops.from_tensor(packed), array)


def test_shortest_edge_keeps_the_aspect_ratio():
    assert image_ops.shortest_edge_size(100, 50, 10) == (20, 10)
    assert image_ops.shortest_edge_size(50, 100, 10) == (10, 20)


@pytest.mark.parametrize("value", [0, 1 << 40, -1, True, 1.5, "9", None, float("nan")])
def test_refuses_options_out_of_range(value):
    with pytest.raises(RequestError, match="max_pixels"):
        KwargRange(int).check("max_pixels", value)


def test_options_may_be_objects_and_fractions():
    size = KwargRange(int, 1, 100, keys=("shortest_edge", "longest_edge"))
    size.check("size", {"shortest_edge": 3})
    for wrong in ({}, {"height": 3}, {"longest_edge": 101}, 3):
        with pytest.raises(RequestError, match="size"):
            size.check("size", wrong)
    KwargRange(float, 0.1, 30).check("fps", 2)
    with pytest.raises(RequestError, match="fps"):
        KwargRange(float, 0.1, 30).check("fps", float("nan"))


def test_frames_are_spread_over_the_whole_video():
    frames = MediaProcessor(ProcessorFiles({})).frame_indices
    assert frames(100, 25.0, {"num_frames": 3}) == [0, 49, 99]
    assert frames(2, 25.0, {}) == [0, 1]
    assert frames(100, 25.0, {"num_frames": -1, "fps": 1}) == [0, 33, 66, 99]
    assert frames(1, 0.0, {"num_frames": 0}) == [0]


@pytest.mark.parametrize("name", PROCESSORS.names())
def test_every_file_defines_a_processor(name):
    made = PROCESSORS.load(name).Processor
    assert issubclass(made, MediaProcessor)
    assert made.modalities
