"""Images of LightOnOCR: those of Mistral 3, as tokens without line breaks."""

from __future__ import annotations

from quire.errors import RequestError
from quire.media.processor import DecodedMedia, Expansion, ProcessedMedia, ProcessorFiles, Settings
from quire.media.processors import mistral3
from quire.media.processors._pixels import size_of


class Processor(mistral3.Processor):
    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.step = size_of(self.settings, "patch_size")[0] if "patch_size" in self.settings else 16

    def placeholder(self, modality: str, index: int) -> str:
        return str(self.files.processor.get("image_token") or "<|image_pad|>")

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        made = super().process(media, kwargs)
        if 0 in made.sizes["grid"]:  # what is left of a square of patches is dropped
            raise RequestError(f"the image is too small: a side is below {self.cell} pixels")
        return made

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, columns = media.sizes["grid"]
        ids = (self.image_id,)
        return Expansion(ids * (rows * columns), ((0, rows * columns),), replaces=ids)
