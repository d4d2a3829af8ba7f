"""Images of BLIP-2: one of a fixed size, whose tokens are before all others of the prompt."""

from __future__ import annotations

from typing import ClassVar

from quire.media.processor import DecodedMedia, Expansion, ProcessedMedia, ProcessorFiles, Settings
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of, resized_and_cropped

BLIP = {**CLIP, "size": {"height": 384, "width": 384}, "do_center_crop": False}
"""What a preprocessor_config.json of BLIP leaves out."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}Answer: {{ message['content'] }} "
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
"""As the published examples ask questions."""


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = BLIP
    takes_embeds = True
    most_items = 1
    fallback_template = TEMPLATE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.rows = int(files.config.get("num_query_tokens") or 32)

    def placeholder(self, modality: str, index: int) -> str:
        return ""

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        # The id of the tokens is any of the vocabulary: their embeddings are replaced.
        found = self.files.config.get("image_token_index", self.files.config.get("image_token_id"))
        vocab = int((self.files.config.get("text_config") or {}).get("vocab_size") or 0)
        token = found if isinstance(found, int) and found < vocab else 0
        return Expansion((token,) * self.rows, ((0, self.rows),), insert_at=0)
