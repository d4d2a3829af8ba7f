"""Images of Florence-2: one of a fixed size, before the text of the encoder. Its prompts are words
of tasks, which become sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.errors import RequestError
from quire.media.processor import (
    PLAIN_TEMPLATE,
    DecodedMedia,
    Expansion,
    Modality,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    CLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    size_of,
)

IMAGE = "<image>"
TASKS = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
"""Word of a task -> the sentence that the model was trained with."""
TASKS_WITH_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}
"""The same of tasks with a text beside the word."""
SIZES: Mapping[str, Any] = {
    "patch_size": (7, 3, 3, 3),
    "patch_stride": (4, 2, 2, 2),
    "patch_padding": (3, 1, 1, 1),
}


class Processor(ImageProcessor):
    defaults: ClassVar[Settings] = CLIP
    most_items = 1
    writes_special_tokens = True
    fallback_template = PLAIN_TEMPLATE

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision = {**SIZES, **(files.config.get("vision_config") or {})}
        key = "crop_size" if self.settings.get("do_center_crop") else "size"
        height, width = size_of(self.settings, key)
        for kernel, stride, padding in zip(*(vision[name] for name in SIZES)):
            height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
        self.rows = 1 + height * width

    def placeholder(self, modality: str, index: int) -> str:
        return IMAGE

    def prompt_text(self, text: str, modalities: Sequence[Modality]) -> str:
        """Replace the word of a task. The image comes first, whatever the text has."""
        text = task_sentence(text.replace(IMAGE, "").strip() if modalities else text)
        return f"{IMAGE}<s>{text}</s>" if modalities else text

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resized_and_cropped(pixels_of(media), self.settings)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        ids = (self.image_id,)
        return Expansion(ids * self.rows, ((0, self.rows),), replaces=ids)


def task_sentence(text: str) -> str:
    """Return a prompt with the sentence of its task. Raises RequestError."""
    for word, sentence in TASKS.items():
        if word in text:
            if text != word:
                raise RequestError(
                    f"the prompt has {word} beside other text: it must be the whole prompt",
                    param="prompt",
                )
            return sentence
    for word, sentence in TASKS_WITH_INPUT.items():
        if word in text:
            return sentence.format(text.replace(word, "").strip())
    return text
