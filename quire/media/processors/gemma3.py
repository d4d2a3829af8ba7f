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
from quire.media.processors._pixels import SIGLIP, ImageProcessor, pixels_of, resized_and_cropped

SCAN = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""Settings of crops, whatever the file of the image processor states."""


class Processor(ImageProcessor):
    defaults = SIGLIP | {"resample": 2}
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

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        first, last = "\n\n<start_of_image>", "<end_of_image>\n\n"
        count = int(media.sizes["images"])
        between = f"{last} and here are some crops to help you see better {first}"
        texts = [first, last]
        if count > 1:
            texts = [f"Here is the original image {first}", between]
            texts += [f"{last} {first}"] * (count - 2) + [last]
        ids, runs = list(self.files.tokenize(texts[0])), []
        for text in texts[1:]:
            runs.append((len(ids), self.rows))
            ids += [self.image_id] * self.rows
            ids += self.files.tokenize(text)
        start = self.token("<start_of_image>")
        return Expansion(tuple(ids), tuple(runs), bidirectional=True, replaces=(start,))


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
