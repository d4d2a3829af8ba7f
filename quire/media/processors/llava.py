"""Images of LLaVA 1.5 and others of its class: one image of a fixed size, a token for each row."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.errors import ConfigError
from quire.media.processor import DecodedMedia, Expansion, ProcessedMedia, ProcessorFiles, Settings
from quire.media.processors import mistral3
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    size_of,
)


class Processor(ImageProcessor):
    """Others of the kind have other defaults."""

    defaults = CLIP
    takes_embeds = True
    vision: ClassVar[Settings] = {"model_type": "clip_vision_model"}
    strategy: ClassVar[str] = "default"

    def __new__(cls, files: ProcessorFiles) -> Any:
        """Return Pixtral's processor for a model with its tower."""
        if (files.config.get("vision_config") or {}).get("model_type") == "pixtral":
            return PixtralProcessor(files)
        return super().__new__(cls)

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = {**self.vision, **(files.config.get("vision_config") or {})}
        size = size_of(
            self.settings, "crop_size" if self.settings.get("do_center_crop") else "size"
        )
        self.side = side = int(vision.get("image_size") or 336)
        self.patch = int(vision.get("patch_size") or 14)
        if size != (side, side):
            raise ConfigError(
                f"preprocessor_config.json makes images of {size[0]} x {size[1]} pixels; the "
                f"model's vision tower reads {side} x {side}"
            )
        first = vision["model_type"] == "clip_vision_model"
        kept = files.config.get("vision_feature_select_strategy", self.strategy) == "full"
        self.rows = (side // self.patch) ** 2 + first - (not kept)

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids = (self.image_id,)
        return Expansion(ids * self.rows, ((0, self.rows),), replaces=ids)


class PixtralProcessor(mistral3.Processor):
    """Pixtral inside the class of LLaVA joins no patches."""

    merge = 1
