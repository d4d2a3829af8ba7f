"""Images of Mistral 3 and Pixtral: of any size in whole patches, a line of tokens for each row."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from quire.media.image_ops import resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of

LONGEST = 2048
"""Of an image, in pixels, that a request may set."""


class Processor(ImageProcessor):
    defaults = CLIP | {"size": {"longest_edge": 1024}}
    allowed_kwargs: ClassVar = {"size": KwargRange(int, 28, LONGEST, ("longest_edge",))}
    merge: ClassVar[int] = 2

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        patch = int(vision.get("patch_size") or 14)
        self.cell = patch * int(files.config.get("spatial_merge_size") or self.merge)
        side = int(vision.get("image_size") or 1540)
        self.longest = side // self.cell * self.cell  # that the tower has positions for
        self.step = self.cell  # of the sides of resized images

    def placeholder(self, modality: str, index: int) -> str:
        return str(self.files.processor.get("image_token") or "[IMG]")

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        height, width = pixels.shape[:2]
        edge = min(int(settings["size"]["longest_edge"]), self.longest)
        ratio = max(height, width) / edge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        tall, wide = (max(-(-side // self.step), 1) * self.step for side in (height, width))
        made = resize(pixels, tall, wide, int(settings["resample"]))
        return self.item([made], {"grid": (tall // self.cell, wide // self.cell)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, columns = media.sizes["grid"]
        line = (*[self.image_id] * columns, self.token("[IMG_BREAK]"))
        ids = (*(line * rows)[:-1], self.token("[IMG_END]"))
        runs = tuple((row * (columns + 1), columns) for row in range(rows))
        return Expansion(ids, runs, replaces=(self.image_id,))
