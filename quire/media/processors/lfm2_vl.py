"""Images of LFM2-VL: nearly of their own size, or, where they are large, tiles and a thumbnail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from quire.media.image_ops import BILINEAR, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, cut_tiles, pixels_of
from quire.media.processors._tiles import nearest_grid

MAX_TILES = 10
MAX_TOKENS = 256


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = SIGLIP | {
        "resample": BILINEAR,
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": MAX_TILES,
        "use_thumbnail": True,
        "min_image_tokens": 64,
        "max_image_tokens": MAX_TOKENS,
        "encoder_patch_size": 16,
        "tile_size": 512,
        "max_pixels_tolerance": 2.0,
    }
    allowed_kwargs: ClassVar = {
        "do_image_splitting": KwargRange(bool),
        "use_thumbnail": KwargRange(bool),
        "min_tiles": KwargRange(int, 2, MAX_TILES),
        "max_tiles": KwargRange(int, 2, MAX_TILES),
        "min_image_tokens": KwargRange(int, 1, MAX_TOKENS),
        "max_image_tokens": KwargRange(int, 1, MAX_TOKENS),
    }
    writes_special_tokens = True

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        height, width = pixels.shape[:2]
        resample, side = int(settings["resample"]), int(settings["tile_size"])
        unit = int(settings["encoder_patch_size"]) * int(settings["downsample_factor"])
        shape = _whole_size(height, width, unit, settings)
        grid, tensors = (1, 1), [to_tensor("scale_shift", self.scale_shift)]
        if settings["do_image_splitting"] and _is_large(height, width, unit, settings):
            least, most = int(settings["min_tiles"]), int(settings["max_tiles"])
            grid = nearest_grid(height, width, (side, side), least, max(least, most))
        if grid != (1, 1):
            image = resize(pixels, grid[0] * side, grid[1] * side, resample)
            tensors.append(to_tensor("tiles", np.stack(cut_tiles(image, side, side))))
        has_whole = grid == (1, 1) or bool(settings["use_thumbnail"])
        if has_whole:
            tensors.append(to_tensor("pixels", resize(pixels, *shape, resample)))
        sizes = {"grid": list(grid), "tile": (side // unit) ** 2}
        sizes["whole"] = shape[0] // unit * (shape[1] // unit) if has_whole else 0
        return ProcessedMedia("image", tuple(tensors), sizes)

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        marked = self.files.processor.get("use_image_special_tokens", True)
        ids: list[int] = [self.token("<|image_start|>")] if marked else []
        runs = []
        for mark, rows in _parts(media.sizes):
            if mark and marked:
                ids.append(self.token(mark))
            runs.append((len(ids), rows))
            ids += [self.image_id] * rows
        if marked:
            ids.append(self.token("<|image_end|>"))
        return Expansion(tuple(ids), tuple(runs), replaces=(self.image_id,))


def _parts(sizes: Settings) -> Iterator[tuple[str, int]]:
    """Yield (the token before it, rows) of each tile, and of the whole image."""
    rows, columns = sizes["grid"]
    tiled = rows * columns > 1
    for i in range(rows * columns if tiled else 0):
        yield f"<|img_row_{i // columns + 1}_col_{i % columns + 1}|>", int(sizes["tile"])
    if sizes["whole"]:
        yield "<|img_thumbnail|>" if tiled else "", int(sizes["whole"])


def _is_large(height: int, width: int, unit: int, settings: dict[str, Any]) -> bool:
    """Whether an image is cut into tiles."""
    patch = int(settings["encoder_patch_size"])
    tall, wide = (max(patch, round(side / unit) * unit) for side in (height, width))
    most = int(settings["max_image_tokens"]) * unit**2
    return tall * wide > most * float(settings["max_pixels_tolerance"])


def _whole_size(height: int, width: int, unit: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Return the size of an image that is not cut, in multiples of a row's pixels."""
    least, most = (int(settings[f"{end}_image_tokens"]) * unit**2 for end in ("min", "max"))
    tall, wide = (max(unit, round(side / unit) * unit) for side in (height, width))
    if tall * wide > most:
        factor = math.sqrt(height * width / most)
        tall, wide = (
            max(unit, math.floor(side / factor / unit) * unit) for side in (height, width)
        )
    elif tall * wide < least:
        factor = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(side * factor / unit) * unit for side in (height, width))
    return tall, wide
