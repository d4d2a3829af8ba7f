"""Images of CLIP: an image is a prompt by itself, of one token, whose result is its embedding."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.media.processor import (
    PLAIN_TEMPLATE,
    DecodedMedia,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
)
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    size_of,
)


class EmbeddedImages(ImageProcessor):
    """Base of processors of models that embed an image."""

    is_whole_prompt = True
    fallback_template = PLAIN_TEMPLATE

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        return Expansion((0,), ((0, 1),))


class Processor(EmbeddedImages):
    """Others of the kind have other defaults."""

    defaults = CLIP

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        side = int((files.config.get("vision_config") or {}).get("image_size") or 224)
        size = size_of(
            self.settings, "crop_size" if self.settings.get("do_center_crop") else "size"
        )
        if size != (side, side):
            raise ConfigError(
                f"preprocessor_config.json makes images of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {side} x {side}"
            )

    def process(self, media: DecodedMedia, kwargs: object) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])
