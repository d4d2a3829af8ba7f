"""Images of PaliGemma: one of a fixed size, before the text. The prefix is bidirectional."""

from __future__ import annotations

from collections.abc import Sequence

from quire.media.processor import (
    DecodedMedia,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, pixels_of, resized_and_cropped

IMAGE = "<image>"


class Processor(ImageProcessor):
    defaults = SIGLIP
    takes_embeds = True
    bidirectional_prompt = True

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = files.config.get("vision_config") or {}
        side, patch = int(vision.get("image_size") or 224), int(vision.get("patch_size") or 14)
        self.rows = (side // patch) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return IMAGE

    def prompt_text(self, text: str, modalities: Sequence[Modality]) -> str:
        """Images, the first token, the text and the line break that ends a prefix."""
        if modalities and IMAGE not in text:
            text = IMAGE * len(modalities) + text
        at = text.rfind(IMAGE) + len(IMAGE) if IMAGE in text else 0
        return f"{text[:at]}<bos>{text[at:]}\n"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids = (self.image_id,)
        return Expansion(ids * self.rows, ((0, self.rows),), replaces=ids)
