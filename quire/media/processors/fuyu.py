"""Images of Fuyu: one of any size up to a largest, before the text. A row of patches is a row of
tokens, which a token of its own ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.errors import ConfigError
from quire.media.image_ops import pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import ImageProcessor, pixels_of, size_of

PATCH, END_OF_ROW, BEGIN, ANSWER = "|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"
DEFAULTS = {
    "do_resize": True,
    "size": {"height": 1080, "width": 1920},
    "patch_size": {"height": 30, "width": 30},
    "resample": 2,
    "padding_value": 1.0,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": 0.5,
    "image_std": 0.5,
}
"""What a preprocessor_config.json leaves out."""


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = DEFAULTS
    most_items = 1
    writes_special_tokens = True
    fallback_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + ANSWER + "{% endif %}"
    )

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.largest = size_of(self.settings)
        height, width = size_of(self.settings, "patch_size")
        self.patch = int(files.config.get("patch_size") or 30)
        if (height, width) != (self.patch, self.patch) or any(x % height for x in self.largest):
            raise ConfigError(
                f"preprocessor_config.json: patches have {height} x {width} pixels, and images up "
                f"to {self.largest[0]} x {self.largest[1]}; the model reads patches of "
                f"{self.patch} x {self.patch}, and sides must be multiples"
            )

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def prompt_text(self, text: str, modalities: Sequence[Modality]) -> str:
        """Behind the text is the token at which answers begin."""
        return f"{text}{ANSWER}" if modalities else text

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, patch = pixels_of(media), self.patch
        height, width = pixels.shape[:2]
        tall, wide = self.largest
        if self.settings.get("do_resize") and (height > tall or width > wide):
            factor = min(tall / height, wide / width)
            height, width = max(int(height * factor), 1), max(int(width * factor), 1)
            pixels = resize(pixels, height, width, int(self.settings["resample"]))
        rows, columns = -(-height // patch), -(-width // patch)
        color = (int(self.settings["padding_value"]),) * 3
        image = pad(pixels, rows * patch, columns * patch, color=color)
        tensors = (to_tensor("pixels", image), to_tensor("scale_shift", self.scale_shift))
        return ProcessedMedia("image", tensors, {"grid": (rows, columns)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, columns = media.sizes["grid"]
        row = (self.token(PATCH),) * columns + (self.token(END_OF_ROW),)
        runs = tuple((i * (columns + 1), columns) for i in range(rows))
        return Expansion((*row * rows, self.token(BEGIN)), runs, insert_at=0)
