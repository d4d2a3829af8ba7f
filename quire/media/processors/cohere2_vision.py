"""Images of Command A Vision: tiles of the canvas that fits best, and the whole image.

Each tile is its patches and the end of a line.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, cut_tiles, pixels_of, size_of

MAX_TILES = 12


class Processor(ImageProcessor):
    defaults = CLIP | {
        "size": {"height": 512, "width": 512},
        "do_center_crop": False,
        "crop_to_patches": True,
        "max_patches": MAX_TILES,
    }
    allowed_kwargs: ClassVar = {
        "max_patches": KwargRange(int, 1, MAX_TILES),
        "crop_to_patches": KwargRange(bool),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.side = int(vision.get("image_size") or 512)
        if (size := size_of(self.settings)) != (self.side, self.side):
            raise ConfigError(
                f"preprocessor_config.json makes tiles of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {self.side} x {self.side}"
            )
        if not 1 <= (most := int(self.settings["max_patches"])) <= MAX_TILES:
            raise ConfigError(
                f"preprocessor_config.json: max_patches is {most}; it must be in [1, {MAX_TILES}]"
            )
        factor = int(files.config.get("downsample_factor") or 2)
        self.rows = (self.side // int(vision.get("patch_size") or 16) // factor) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return "<|IMG_PATCH|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        side, resample = self.side, int(settings["resample"])
        tiles = []
        if settings["crop_to_patches"]:
            rows, columns = closest_canvas(pixels.shape[:2], side, int(settings["max_patches"]))
            tiles = cut_tiles(resize(pixels, rows * side, columns * side, resample), side, side)
        if len(tiles) != 1:
            tiles.append(resize(pixels, side, side, resample))
        return self.item(tiles, {"tiles": len(tiles)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        count = int(media.sizes["tiles"])
        tile = (*(self.image_id,) * self.rows, self.token("<|IMG_LINE_BREAK|>"))
        ids = (self.token("<|START_OF_IMG|>"), *tile * count, self.token("<|END_OF_IMG|>"))
        runs = tuple((1 + i * (self.rows + 1), self.rows) for i in range(count))
        return Expansion(ids, runs, replaces=(self.image_id,))


def closest_canvas(shape: Any, side: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of the tiles that the image fits with least enlargement, or else with
    least reduction; of equal ones the fewest tiles, then the fewest columns."""
    each = range(1, most + 1)
    grids = [(y, x) for x in each for y in each if x * y <= most]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = (np.array(grids) * side / np.array(shape)).min(axis=1)
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.inf, scales).argmin())]
