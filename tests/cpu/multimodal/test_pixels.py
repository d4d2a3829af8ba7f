"""Pixels of images are those of transformers' processors: exactly of those without torchvision,
within a bound of those with it, whose resizing rounds elsewhere."""

import importlib

import numpy as np
import pytest
import torch

from quire.media.image_ops import from_tensor
from tests.cpu.multimodal.families import FAMILIES, Pair, image

CLASSES = {
    "llava": "CLIPImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "internvl": "GotOcr2ImageProcessor",
    "llava_next": "LlavaNextImageProcessor",
    "llava_onevision": "LlavaOnevisionImageProcessor",
    "idefics3": "Idefics3ImageProcessor",
    "cohere2_vision": "Cohere2VisionImageProcessor",
    "pixtral": "PixtralImageProcessor",
}
SIZES = [(56, 56), (40, 120), (200, 61), (300, 333)]
LEVELS = 2
"""Most that a channel of a pixel differs by, of 255 levels."""


def pixels_of(images, given):
    """What a processor of transformers makes of one image: [tiles, C, H, W]."""
    found = images(given, return_tensors="pt")["pixel_values"]
    return torch.as_tensor(found).flatten(0, -4).numpy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLASSES)
def test_pixels_are_those_of_transformers(name):
    config, processor = FAMILIES[name]()
    pair = Pair(None, processor, None)
    pair.hf = config.to_dict()
    exact = processor.image_processor
    made = getattr(importlib.import_module("transformers"), CLASSES[name])
    settings = {k: v for k, v in exact.to_dict().items() if k != "image_processor_type"}
    near = made(**settings)
    for size in SIZES:
        given = image(*size)
        (item,) = pair.process([given])
        tensors = {one.name: from_tensor(one) for one in item.tensors}
        scale, shift = tensors["scale_shift"]
        ours = (tensors["pixels"] * scale + shift).transpose(0, 3, 1, 2)
        assert np.abs(ours - pixels_of(exact, given)).max() < 1e-6
        apart = np.abs(ours - pixels_of(near, given)) / scale[:, None, None]
        assert apart.max() < LEVELS + 0.01
        assert apart.mean() < 0.2
