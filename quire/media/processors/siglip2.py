"""Images of SigLIP 2 of any shape: as many patches as fit, at nearly the image's aspect ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from quire.errors import ConfigError
from quire.media.image_ops import resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, pixels_of
from quire.media.processors.clip import EmbeddedImages

MAX_PATCHES = 1024


class Processor(EmbeddedImages):
    defaults: ClassVar[Settings] = {
        **SIGLIP,
        "resample": 2,
        "patch_size": 16,
        "max_num_patches": 256,
    }
    allowed_kwargs: ClassVar[Mapping[str, KwargRange]] = {
        "max_num_patches": KwargRange(int, 1, MAX_PATCHES)
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        most = self.settings["max_num_patches"]
        if not isinstance(most, int) or not 1 <= most <= MAX_PATCHES:
            raise ConfigError(
                f"preprocessor_config.json: max_num_patches is {most!r:.40}; it must be an integer "
                f"in [1, {MAX_PATCHES}]"
            )

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, patch = pixels_of(media), int(self.settings["patch_size"])
        most = int(kwargs.get("max_num_patches", self.settings["max_num_patches"]))
        size = size_for_patches(pixels.shape[0], pixels.shape[1], patch, most)
        image = resize(pixels, *size, int(self.settings["resample"]))
        tensors = (to_tensor("pixels", image), to_tensor("scale_shift", self.scale_shift))
        return ProcessedMedia("image", tensors)


def size_for_patches(height: int, width: int, patch: int, most: int) -> tuple[int, int]:
    """Return (height, width) of the image: the largest factor at which the patches fit.

    Sides are rounded up to whole patches. The factor is found by halving, as in transformers: where
    the halving ends decides sizes that are near a border.
    """

    def scaled(factor: float) -> tuple[int, int]:
        tall, wide = (max(math.ceil(side * factor / patch), 1) for side in (height, width))
        return tall * patch, wide * patch

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        tall, wide = scaled(middle)
        if tall // patch * (wide // patch) <= most:
            low = middle
        else:
            high = middle
    return scaled(low)
