"""Images of H2OVL-Mississippi: tiles of two grids, if a prompt has one image, and a thumbnail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.media.image_ops import resize
from quire.media.processor import (
    DecodedMedia,
    KwargRange,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors import internvl_chat
from quire.media.processors._pixels import cut_tiles, pixels_of, size_of
from quire.media.processors._tiles import nearest_grid

LEAST_SECOND = 3
"""Tiles of the second grid, at least."""


class Processor(internvl_chat.Processor):
    allowed_kwargs: ClassVar = internvl_chat.Processor.allowed_kwargs | {
        "use_msac": KwargRange(bool)
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings["use_msac"] = files.config.get("use_msac", False)

    def prompt_kwargs(self, modalities: Sequence[Modality]) -> Settings:
        return {"use_msac": False} if len(modalities) > 1 else {}

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        settings = {**self.settings, **self.own_names(kwargs)}
        if not kwargs.get("use_msac", settings["use_msac"]):
            return super().process(media, kwargs)
        pixels, tile, resample = pixels_of(media), size_of(settings), int(settings["resample"])
        height, width, _ = pixels.shape
        grids = two_grids(height, width, tile, int(settings["max_patches"]))
        tiles = [
            one
            for rows, columns in grids
            if rows * columns > 1
            for one in cut_tiles(resize(pixels, rows * tile[0], columns * tile[1], resample), *tile)
        ]
        return self.item([*tiles, resize(pixels, *tile, resample)], {"tiles": len(tiles) + 1})


def two_grids(
    height: int, width: int, tile: tuple[int, int], most: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the grids (rows, columns) of the tiles that come first and second.

    The second grid is the nearest one, as InternVL has it. The first is the nearest of those whose
    rows and columns both do not divide the second one's, or (1, 1).
    """
    rows, columns = nearest_grid(height, width, tile, 1, most)

    def differs(grid: tuple[int, int]) -> bool:
        return rows % grid[0] != 0 and columns % grid[1] != 0

    return nearest_grid(height, width, tile, LEAST_SECOND, most, differs), (rows, columns)
