"""Images of Llama 4: tiles of the canvas that fits best, and the whole image.

<|image_start|> patches <|tile_x_separator|> patches <|tile_y_separator|> ... <|image|> patches
<|image_end|>
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.media.image_ops import pad, resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, cut_tiles, pixels_of, size_of

MAX_TILES = 16
Grid = tuple[int, int]


class Processor(ImageProcessor):
    defaults = SIGLIP | {
        "size": {"height": 336, "width": 336},
        "resample": 2,
        "max_patches": MAX_TILES,
        "resize_to_max_canvas": False,
    }
    allowed_kwargs: ClassVar = {
        "max_patches": KwargRange(int, 1, MAX_TILES),
        "resize_to_max_canvas": KwargRange(bool),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.side = int(vision.get("image_size") or 448)
        if (size := size_of(self.settings)) != (self.side, self.side):
            raise ConfigError(
                f"preprocessor_config.json makes tiles of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {self.side} x {self.side}"
            )
        if not 1 <= (most := int(self.settings["max_patches"])) <= MAX_TILES:
            raise ConfigError(
                f"preprocessor_config.json: max_patches is {most}; it must be in [1, {MAX_TILES}]"
            )
        self.rows = (self.side // int(vision.get("patch_size") or 14) // 2) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return "<|image|>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        shape, side, resample = pixels.shape[:2], self.side, int(settings["resample"])
        largest = bool(settings["resize_to_max_canvas"])
        grid = best_grid(shape, side, int(settings["max_patches"]), largest=largest)
        canvas = grid[0] * side, grid[1] * side
        room = canvas
        if not largest:  # little images grow to a tile at most
            room = min(max(shape[0], side), canvas[0]), min(max(shape[1], side), canvas[1])
        fitted = resize(pixels, *fitted_size(shape, room), resample)
        tiles = cut_tiles(pad(fitted, *canvas), side, side)
        if len(tiles) > 1:
            tiles.append(resize(pixels, side, side, resample))
        return self.item(tiles, {"grid": grid})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        down, across = media.sizes["grid"]
        ids, runs = [self.token("<|image_start|>")], []

        def add() -> None:
            runs.append((len(ids), self.rows))
            ids.extend([self.image_id] * self.rows)

        for _ in range(down if down * across > 1 else 0):
            for x in range(across):
                add()
                last = x == across - 1
                ids.append(self.token("<|tile_y_separator|>" if last else "<|tile_x_separator|>"))
        ids.append(self.token("<|image|>"))
        add()
        ids.append(self.token("<|image_end|>"))
        replaced = (self.token("<|image|>"),)
        return Expansion(tuple(ids), tuple(runs), replaces=replaced)


def fitted_size(shape: Any, room: Grid) -> Grid:
    """Return the largest (height, width) of the image's aspect ratio inside of a room."""
    scale_y, scale_x = room[0] / shape[0], room[1] / shape[1]
    if scale_x < scale_y:
        return max(min(math.floor(shape[0] * scale_x), room[0]), 1), room[1]
    return room[0], max(min(math.floor(shape[1] * scale_y), room[1]), 1)


def best_grid(shape: Any, side: int, most: int, *, largest: bool) -> Grid:
    """Return (rows, columns) of tiles: the canvas that the image fits with least enlargement, or
    else with least reduction; of equal ones the smallest. largest: with most enlargement.

    Scales are float32, as in transformers: ties depend on it.
    """
    grids = canvases(most)
    sizes = np.array(grids, np.float32) * side
    scales = (sizes / np.array(shape, np.float32)).min(axis=1)
    growing = scales[scales >= 1]
    if len(growing):
        wanted = growing.max() if largest else growing.min()
    else:
        wanted = scales.max()
    chosen = [grid for grid, scale in zip(grids, scales, strict=True) if scale == wanted]
    return min(chosen, key=lambda grid: grid[0] * grid[1])


@lru_cache
def canvases(most: int) -> list[Grid]:
    """Return (rows, columns) of up to `most` tiles, those of one aspect ratio together."""
    by_ratio: dict[float, list[Grid]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_ratio.values() for grid in grids]
