"""Images of InternVL in the form of transformers: up to 12 tiles and a thumbnail."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    size_of,
)
from quire.media.processors._tiles import tiles_with_thumbnail

MAX_TILES = 12
"""Of a request; a checkpoint may state more."""
TILES = CLIP | {
    "size": {"height": 384, "width": 384},
    "do_center_crop": False,
    "min_patches": 1,
    "max_patches": MAX_TILES,
}


class Processor(ImageProcessor):
    defaults = TILES
    allowed_kwargs: ClassVar = {
        "crop_to_patches": KwargRange(bool),
        "min_patches": KwargRange(int, 1, MAX_TILES),
        "max_patches": KwargRange(int, 1, MAX_TILES),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings["crop_to_patches"] = True  # whatever the file of the image processor states
        self.per_tile = self.tile_rows()

    def tile_rows(self) -> int:
        """Rows of a tile."""
        vision: dict[str, Any] = self.files.config.get("vision_config") or {}
        patch = vision.get("patch_size") or 14
        patch = patch if isinstance(patch, int) else patch[0]
        ratio = float(self.files.config.get("downsample_ratio") or 0.5)
        return int((size_of(self.settings)[0] // patch * ratio) ** 2)

    def placeholder(self, modality: str, index: int) -> str:
        return "<IMG_CONTEXT>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        if settings["crop_to_patches"] and settings["max_patches"] > 1:
            tiles = tiles_with_thumbnail(
                pixels,
                size_of(settings),
                int(settings["min_patches"]),
                int(settings["max_patches"]),
                int(settings["resample"]),
                thumbnail=bool(settings.get("use_thumbnail", True)),
            )
        else:
            tiles = [resized_and_cropped(pixels, settings)]
        return self.item(tiles, {"tiles": len(tiles)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows = int(media.sizes["tiles"]) * self.per_tile
        ids = (self.token("<img>"), *[self.image_id] * rows, self.token("</img>"))
        return Expansion(ids, ((1, rows),), replaces=(self.image_id,))
