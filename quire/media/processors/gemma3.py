"""Images of Gemma 3: one of a fixed size, and crops of long ones if pan-and-scan is on."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    Pixels,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import (
    SIGLIP,
    ImageProcessor,
    pixels_of,
    resized_and_cropped,
    tiles_of,
)

SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Settings of crops, whatever the file of the image processor states."""

CROPS = "\n\n and here are some crops to help you see better \n\n"
APART = "\n\n \n\n"
"""What is between an image and its crops, and between two crops."""


class Processor(ImageProcessor):
    defaults = SIGLIP | {"resample": 2}
    takes_embeds = True
    allowed_kwargs: ClassVar = {
        "do_pan_and_scan": KwargRange(bool),
        "pan_and_scan_min_crop_size": KwargRange(int, 16, 4096),
        "pan_and_scan_max_num_crops": KwargRange(int, 1, 4),
        "pan_and_scan_min_ratio_to_activate": KwargRange(float, 1, 100),
    }

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self.settings |= SCAN  # only a request or the server's settings turn it on
        self.rows = int(files.config.get("mm_tokens_per_image") or 256)

    def placeholder(self, modality: str, index: int) -> str:
        return "<start_of_image>"

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels, settings = pixels_of(media), {**self.settings, **kwargs}
        whole = [pixels, *(crops(pixels, settings) if settings["do_pan_and_scan"] else [])]
        images = [resized_and_cropped(one, settings) for one in whole]
        return self.item(images, {"images": len(images)})

    def item_text(self, media: ProcessedMedia, index: int, following: str = "") -> str:
        """The line breaks around images form tokens with those of the prompt."""
        pair = "<start_of_image><end_of_image>"
        count = tiles_of(media, "images", self.rows)
        if count == 1:
            return f"\n\n{pair}\n\n"
        crops = [pair] * (count - 1)
        return f"Here is the original image \n\n{pair}{CROPS}{APART.join(crops)}\n\n"

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        start, end = self.token("<start_of_image>"), self.token("<end_of_image>")
        count = tiles_of(media, "images", self.rows)
        between = [CROPS, *[APART] * (count - 2)] if count > 1 else []
        replaces, ids, runs = [start, end], [start], [(1, self.rows)]
        for text in between:
            words = (end, *self.files.tokenize(text), start)
            replaces[-1:] = [*words, end]
            ids += [*[self.image_id] * self.rows, *words]
            runs.append((len(ids), self.rows))
        ids += [*[self.image_id] * self.rows, end]
        return Expansion(tuple(ids), tuple(runs), bidirectional=True, replaces=tuple(replaces))


def crops(pixels: Pixels, settings: Settings) -> list[Pixels]:
    """Cut a long image along its longer side; none if it is not long, or crops were small."""
    height, width = pixels.shape[:2]
    size = int(settings["pan_and_scan_min_crop_size"])
    long, short = max(height, width), min(height, width)
    if long / short < float(settings["pan_and_scan_min_ratio_to_activate"]):
        return []
    count = min(long // size, math.floor(long / short + 0.5))
    count = min(max(count, 2), int(settings["pan_and_scan_max_num_crops"]))
    step = math.ceil(long / count)
    if min(step, short) < size:
        return []
    cuts: list[Any] = [slice(i * step, (i + 1) * step) for i in range(count)]
    return [pixels[:, cut] if width >= height else pixels[cut] for cut in cuts]
