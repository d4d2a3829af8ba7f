"""Images of DeepSeek-VL: the longer side fills a square, the rest of it has one color."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.media.image_ops import resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    padded_to_square,
    pixels_of,
    size_of,
)


class Processor(ImageProcessor):
    defaults = CLIP | {"size": {"height": 384, "width": 384}, "min_size": 14}
    takes_embeds = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        side, patch = int(vision.get("image_size") or 224), int(vision.get("patch_size") or 16)
        if (size := size_of(self.settings)) != (side, side):
            raise ConfigError(
                f"preprocessor_config.json makes images of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {side} x {side}"
            )
        self.side, self.rows = side, (side // patch) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return "<image_placeholder>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, least = pixels_of(media), int(self.settings["min_size"])
        scale = self.side / max(pixels.shape[:2])
        size = [max(round(length * scale), least) for length in pixels.shape[:2]]
        pixels = resize(pixels, size[0], size[1], int(self.settings["resample"]))
        color = [int(255 * mean) for mean in self.settings["image_mean"]]
        return self.item([padded_to_square(pixels, color)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids = (self.image_id,)
        return Expansion(ids * self.rows, ((0, self.rows),), replaces=ids)
