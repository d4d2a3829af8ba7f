"""Images of Llama-3.2-Vision: tiles that cross attention reads. One token marks an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import BILINEAR, pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, HALF, ImageProcessor, cut_tiles, pixels_of, size_of

IMAGE = "<|image|>"
FIRST = "<|begin_of_text|>"


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = CLIP | {
        "size": {"height": 224, "width": 224},
        "resample": BILINEAR,
        "image_mean": HALF,
        "image_std": HALF,
        "max_image_tiles": 4,
    }
    allowed_kwargs: ClassVar = {"max_image_tiles": KwargRange(int, 1, 4)}
    writes_special_tokens = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.config.get("vision_config") or {}
        side, patch = int(vision.get("image_size") or 448), int(vision.get("patch_size") or 14)
        self.rows = (side // patch) ** 2 + 1
        self.most = int(vision.get("max_num_tiles") or 4)
        self.side, width = size_of(self.settings)
        if (self.side, width) != (side, side) or int(self.settings["max_image_tiles"]) > self.most:
            raise ConfigError(
                f"preprocessor_config.json makes up to {self.settings['max_image_tiles']} tiles of "
                f"{self.side} x {width} pixels; the model's vision tower reads up to {self.most} "
                f"of {side} x {side}"
            )

    def placeholder(self, modality: str, index: int) -> str:
        return IMAGE

    def prompt_text(self, text: str, modalities: Sequence[Modality]) -> str:
        """The first token of texts follows the images that a prompt begins with."""
        if FIRST in text:
            return text
        rest = text
        while rest.startswith(IMAGE):
            rest = rest.removeprefix(IMAGE)
        return text[: len(text) - len(rest)] + FIRST + rest

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, side = pixels_of(media), self.side
        grids = _grids(int(kwargs.get("max_image_tiles", self.settings["max_image_tiles"])))
        height, width = pixels.shape[:2]
        rows, columns = _best_grid(height, width, grids, side)
        shape = _fitting_size(height, width, rows * side, columns * side, side)
        whole = resize(pixels, *shape, int(self.settings["resample"]))
        tiles = cut_tiles(pad(whole, rows * side, columns * side), side, side)
        made = self.item(tiles, {"tiles": len(tiles)})
        ratio = np.array([_grids(self.most).index((rows, columns)) + 1])
        return ProcessedMedia("image", (*made.tensors, to_tensor("ratio", ratio)), made.sizes)

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids = (self.image_id,)
        return Expansion(ids, (), replaces=ids, source_rows=self.rows * media.sizes["tiles"])


def _grids(most: int) -> list[tuple[int, int]]:
    """(rows, columns) of the tilings, in the order of their positions in checkpoints."""
    side = range(1, most + 1)
    return [(rows, columns) for rows in side for columns in side if rows * columns <= most]


def _best_grid(
    height: int, width: int, grids: Sequence[tuple[int, int]], side: int
) -> tuple[int, int]:
    """Return the tiling that enlarges an image least, or else shrinks it least; of equals that
    with the fewest tiles, then the first."""

    def rank(grid: tuple[int, int]) -> tuple[bool, float, int]:
        scale = min(grid[0] * side / height, grid[1] * side / width)
        return scale < 1, scale if scale >= 1 else -scale, grid[0] * grid[1]

    return min(grids, key=rank)


def _fitting_size(
    height: int, width: int, most_height: int, most_width: int, side: int
) -> tuple[int, int]:
    """Return the size at which an image fits into the tiles; a small one becomes as large as one
    tile."""
    target_height = min(max(height, side), most_height)
    target_width = min(max(width, side), most_width)
    down, across = target_height / height, target_width / width
    if across < down:
        return min(math.floor(height * across) or 1, target_height), target_width
    return target_height, min(math.floor(width * down) or 1, target_width)
