"""Images of Phi-3-vision: resized to a width of whole tiles, and padded with white to whole tiles.

Placeholders are numbered texts, and each text between them is tokenized as a prompt of its own.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import BILINEAR, pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of

MOST_TILES = 16
MERGE = 2
"""Patches along a side of a square that has one row."""


class Processor(ImageProcessor):
    defaults = CLIP | {"num_crops": 1}
    text_placeholders = True
    special_tokens_in_parts = True
    allowed_kwargs: ClassVar = {"num_crops": KwargRange(int, 1, MOST_TILES)}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("img_processor") or {}
        self.side = int(vision.get("image_size") or 336)
        self.squares = self.side // int(vision.get("patch_size") or 14) // MERGE
        if not 1 <= (most := int(self.settings["num_crops"])) <= MOST_TILES:
            raise ConfigError(
                f"preprocessor_config.json: num_crops is {most}; it must be in [1, {MOST_TILES}]"
            )

    @property
    def image_id(self) -> int:
        return self.token("<|image|>")

    def placeholder(self, modality: str, index: int) -> str:
        return f"<|image_{index}|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        most = int({**self.settings, **kwargs}["num_crops"])
        pixels = whole_tiles(pixels_of(media), self.side, most)
        tensors = (to_tensor("pixels", pixels), to_tensor("scale_shift", self.scale_shift))
        grid = pixels.shape[0] // self.side, pixels.shape[1] // self.side
        return ProcessedMedia("image", tensors, {"grid": grid})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        y, x = media.sizes["grid"]
        rows = (y * x + 1) * self.squares**2 + 1 + (y + 1) * self.squares
        return Expansion((self.image_id,) * rows, ((0, rows),))


def whole_tiles(pixels: Pixels, side: int, most: int) -> Pixels:
    """Resize an image so that its longer side has as many tiles as fit, at most `most` in all.

    The shorter one is padded in its middle.
    """
    height, width = pixels.shape[:2]
    if width < height:
        turned = whole_tiles(pixels.transpose(1, 0, 2), side, most)
        return np.ascontiguousarray(turned.transpose(1, 0, 2))
    ratio = width / height
    across = max(n for n in range(1, most + 1) if n * math.ceil(n / ratio) <= most)
    width = across * side
    height = max(int(width / ratio), 1)
    pixels = resize(np.ascontiguousarray(pixels), height, width, BILINEAR)
    tall = math.ceil(height / side) * side
    return pad(pixels, tall, width, top=(tall - height) // 2, color=(255, 255, 255))
