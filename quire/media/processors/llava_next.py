"""Images of LLaVA-NeXT: the whole image, and tiles of it in the best of a few resolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.types import MediaTensor
from quire.media.image_ops import pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import llava
from quire.media.processors._pixels import CLIP, cut_tiles, pixels_of, resized_and_cropped
from quire.media.processors._tiles import best_resolution

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Resolutions (height, width), if the files state none."""


class Processor(llava.Processor):
    defaults = CLIP | {"image_grid_pinpoints": PINPOINTS}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings["do_pad"] = False  # here it is about batches
        self.sizes = [(int(one[0]), int(one[1])) for one in self.settings["image_grid_pinpoints"]]

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), self.settings
        height, width = pixels.shape[:2]
        best = best_resolution(height, width, self.sizes)
        resample = int(settings["resample"])
        parts = cut_tiles(padded(pixels, *best, resample), self.side, self.side)
        whole = resize(pixels, self.side, self.side, resample)
        tiles = [resized_and_cropped(one, settings) for one in (whole, *parts)]
        further = self.order(height, width, best)
        made = self.item(tiles, {"rows": further[0].shape[0]})
        return ProcessedMedia("image", (*made.tensors, *further), made.sizes)

    def order(self, height: int, width: int, best: tuple[int, int]) -> tuple[MediaTensor, ...]:
        """Number the rows of the encoder in the order of the prompt; see its Encoder.

        All rows of the whole image, then each line of the unpadded tiles with its end.
        """
        lines, newline = self.grid_lines(best)
        return self.lines_in_order(unpadded(lines, height, width), newline)

    def lines_in_order(self, lines: npt.NDArray[np.int64], newline: int) -> tuple[MediaTensor, ...]:
        """Return `order` of all rows of the whole image, and of lines with their ends."""
        ends = np.full((len(lines), 1), newline)
        flat = np.concatenate((lines, ends), axis=1).reshape(-1)
        order = np.concatenate((np.arange(self.rows), flat)).astype(np.int32)
        return (to_tensor("order", order),)

    def grid_lines(self, best: tuple[int, int]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the numbers of the rows of all tiles but the first, as they lie in the image, and
        the number of the vector at the end of a line."""
        down, across, side = best[0] // self.side, best[1] // self.side, self.side // self.patch
        tiles = np.arange(down * across)[:, None] * self.rows + np.arange(side**2)
        cells = tiles.reshape(down, across, side, side).transpose(0, 2, 1, 3)
        lines = cells.reshape(down * side, across * side) + self.rows
        return lines, (1 + down * across) * self.rows

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids, rows = (self.image_id,), int(media.sizes["rows"])
        return Expansion(ids * rows, ((0, rows),), replaces=ids)


def padded(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Resize to fit into [height, width], keep the aspect ratio, and put it in the middle."""
    size = fitted_size(pixels.shape[:2], height, width)
    made = resize(pixels, *size, resample)
    return pad(made, height, width, top=(height - size[0]) // 2, left=(width - size[1]) // 2)


def fitted_size(shape: Any, height: int, width: int) -> tuple[int, int]:
    """Return the largest (height, width) of the image's aspect ratio inside [height, width]."""
    tall, wide = shape
    scale_x, scale_y = width / wide, height / tall
    if scale_x < scale_y:
        return min(int(np.ceil(tall * scale_x)), height), width
    return height, min(int(np.ceil(wide * scale_y)), width)


def unpadded(lines: npt.NDArray[np.int64], height: int, width: int) -> npt.NDArray[np.int64]:
    """Cut away the rows that show padding of an image of this size."""
    tall, wide = lines.shape
    if width / height > wide / tall:
        kept = round(height * (wide / width), 7)
        cut = (tall - int(kept)) // 2
        return lines[cut : tall - cut]
    kept = round(width * (tall / height), 7)
    cut = (wide - int(kept)) // 2
    return lines[:, cut : wide - cut]
