"""Images of GOT-OCR 2: one of a fixed size, or with `crop_to_patches` tiles and the whole image."""

from __future__ import annotations

from typing import Any

from quire.media.processor import Expansion, Modality, ProcessedMedia, ProcessorFiles
from quire.media.processors import internvl
from quire.media.processors._pixels import size_of, tiles_of

PAD = "<imgpad>"
TEMPLATE = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in "
    "detail.<|im_end|>{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As the processor of transformers writes a prompt."""


class Processor(internvl.Processor):
    modalities: tuple[Modality, ...] = ("image",)
    fallback_template = TEMPLATE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings["crop_to_patches"] = False

    def tile_rows(self) -> int:
        vision: dict[str, Any] = self.files.config.get("vision_config") or {}
        side = size_of(self.settings)[0] // int(vision.get("patch_size") or 16)
        return int((-(-side // 4)) ** 2)

    def placeholder(self, modality: str, index: int) -> str:
        return f"<img>{PAD}</img>"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows = tiles_of(media, "tiles", self.per_tile) * self.per_tile
        return Expansion((self.image_id,) * rows, ((0, rows),), replaces=(self.image_id,))
