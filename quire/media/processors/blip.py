"""Images of BLIP: one of a fixed size, which the encoder reads alone. The text is the decoder's."""

from __future__ import annotations

from typing import ClassVar

from quire.config.encoder_facts import image_positions
from quire.errors import ConfigError
from quire.media.processor import (
    PLAIN_TEMPLATE,
    DecodedMedia,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    size_of,
)
from quire.media.processors.blip_2 import BLIP


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = BLIP
    most_items = 1
    decoder_has_text = True
    fallback_template = PLAIN_TEMPLATE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.config.get("vision_config") or {}
        self.rows, side = image_positions(vision), int(vision.get("image_size") or 384)
        if (size := size_of(self.settings)) != (side, side):
            raise ConfigError(
                f"preprocessor_config.json makes images of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {side} x {side}"
            )

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return Expansion((0,) * self.rows, ((0, self.rows),))
