"""Images of Idefics 3: tiles with the names of their places, and the whole image."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from quire.errors import ConfigError
from quire.media.image_ops import resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, cut_tiles, pixels_of

LONGEST = 4096
"""Of a resized image, in pixels."""
MAX_TILES = 6
"""Rows and columns that have names."""


class Processor(ImageProcessor):
    defaults = SIGLIP | {
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "do_image_splitting": True,
    }
    allowed_kwargs: ClassVar = {
        "do_image_splitting": KwargRange(bool),
        "size": KwargRange(int, 28, LONGEST, ("longest_edge",)),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.side = int(self.settings["max_image_size"]["longest_edge"])
        if self.side != (side := int(vision.get("image_size") or 224)):
            raise ConfigError(
                f"preprocessor_config.json makes tiles of {self.side} pixels; the model's vision "
                f"tower reads {side}"
            )
        factor = int(files.config.get("scale_factor") or 2)
        self.rows = (side // int(vision.get("patch_size") or 32) // factor) ** 2

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        resample, side = int(settings["resample"]), self.side
        if settings["do_resize"]:
            edge = int(settings["size"]["longest_edge"])
            pixels = resize(pixels, *edge_size(pixels, edge), resample)
        if not settings["do_image_splitting"]:
            return self.item([resize(pixels, side, side, resample)], {"grid": (0, 0)})
        pixels = resize(pixels, *whole_tiles(pixels, side), resample)
        grid = pixels.shape[0] // side, pixels.shape[1] // side
        if max(grid) > MAX_TILES:  # has no names, and is more than the encoder counts with
            pixels, grid = resize(pixels, side, side, resample), (1, 1)
        if grid == (1, 1):
            return self.item([pixels], {"grid": (0, 0)})
        tiles: list[Pixels] = cut_tiles(pixels, side, side)
        return self.item([*tiles, resize(pixels, side, side, resample)], {"grid": grid})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        down, across = media.sizes["grid"]
        around = self.token("<fake_token_around_image>")
        ids: list[int] = []
        runs: list[tuple[int, int]] = []

        def add(name: str) -> None:
            ids.extend((around, *self.files.tokenize(name)))
            runs.append((len(ids), self.rows))
            ids.extend([self.image_id] * self.rows)

        for y in range(1, down + 1):
            for x in range(1, across + 1):
                add(f"<row_{y}_col_{x}>")
            ids += self.files.tokenize("\n" if y < down else "\n\n")
        add("<global-img>")
        ids.append(around)
        return Expansion(tuple(ids), tuple(runs), replaces=(self.image_id,))


def edge_size(pixels: Pixels, longest: int) -> tuple[int, int]:
    """Return (height, width) with this longest side; the other one is even, but at most LONGEST."""
    height, width = pixels.shape[:2]
    ratio = width / height
    if width >= height:
        height, width = int(longest / ratio), longest
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LONGEST:
        height, width = int(LONGEST / ratio), LONGEST
    elif height > width and height > LONGEST:
        height, width = LONGEST, int(LONGEST * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(pixels: Pixels, side: int) -> tuple[int, int]:
    """Return (height, width) in whole tiles: the longer side first, rounded up; then the other."""
    height, width = pixels.shape[:2]
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return math.ceil(int(width / ratio) / side) * side, width
    height = math.ceil(height / side) * side
    return height, math.ceil(int(height * ratio) / side) * side
