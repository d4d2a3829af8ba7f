"""Images of Qwen-VL: one of a fixed size, with as many rows as the model has queries."""

from __future__ import annotations

from typing import Any

from quire.media.image_ops import BICUBIC, resize
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor(ImageProcessor):
    defaults = CLIP
    fallback_template = CHATML

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        visual: dict[str, Any] = files.config["visual"]
        self.side = int(visual["image_size"])
        self.rows = int(visual.get("n_queries") or 256)
        self.start = int(visual.get("image_start_id") or 151857)
        """Id of <img>. Those of </img> and of the rows follow."""

    def placeholder(self, modality: str, index: int) -> str:
        return f"Picture {index}: <img></img>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resize(pixels_of(media), self.side, self.side, BICUBIC)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        form = self.start, self.start + 1
        ids = (form[0], *[self.start + 2] * self.rows, form[1])
        return Expansion(ids, ((1, self.rows),), replaces=form)
