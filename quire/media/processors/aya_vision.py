"""Images of Aya Vision: up to 12 tiles, each with its name, and the whole image."""

from __future__ import annotations

from typing import Any

from quire.media.processor import Expansion, ProcessedMedia
from quire.media.processors import internvl
from quire.media.processors._pixels import ImageProcessor, size_of, tiles_of


class Processor(internvl.Processor):
    modalities = ("image",)
    text_placeholders = True

    def tile_rows(self) -> int:
        vision: dict[str, Any] = self.files.config.get("vision_config") or {}
        patch = int(vision.get("patch_size") or 14)
        factor = int(self.files.config.get("downsample_factor") or 2)
        return (size_of(self.settings)[0] // (patch * factor)) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return ImageProcessor.placeholder(self, modality, index)

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        return self.placeholder(media.modality, index)

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        tiles = tiles_of(media, "tiles", self.per_tile)
        names = [f"TILE_{i}" for i in range(1, tiles)] + ["TILE_GLOBAL"]
        patch = self.token("<|IMG_PATCH|>")
        ids, runs = [self.token("<|START_OF_IMG|>")], []
        for name in names:
            ids += self.files.tokenize(name)
            runs.append((len(ids), self.per_tile))
            ids += [patch] * self.per_tile
        ids.append(self.token("<|END_OF_IMG|>"))
        return Expansion(tuple(ids), tuple(runs))
