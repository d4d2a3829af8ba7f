"""Images of Kimi-VL: any size, shrunk to a number of patches, padded to whole squares of them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from quire.errors import ConfigError, RequestError
from quire.media.image_ops import BICUBIC, pad, resize, to_tensor
from quire.media.processor import (
    DecodedMedia,
    Expansion,
    KwargRange,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import SIGLIP, ImageProcessor, pixels_of

MOST_PATCHES = 16384
MOST_SIDE = 512


class Processor(ImageProcessor):
    defaults = SIGLIP | {"in_token_limit": 4096, "patch_size": 14, "merge_kernel_size": (2, 2)}
    allowed_kwargs: ClassVar = {"in_token_limit": KwargRange(int, 16, MOST_PATCHES)}

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.patch = int(vision.get("patch_size") or 14)
        self.merge = int((vision.get("merge_kernel_size") or (2, 2))[0])
        limit, padded = int(self.settings["in_token_limit"]), self.settings.get("pad_input", True)
        if limit > MOST_PATCHES or not padded:
            raise ConfigError(
                f"preprocessor_config.json: in_token_limit is {limit} and pad_input {padded}; "
                f"supported: at most {MOST_PATCHES}, and true"
            )

    def placeholder(self, modality: str, index: int) -> str:
        return "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"

    @property
    def image_id(self) -> int:
        found = self.files.config.get("media_placeholder_token_id")
        return found if isinstance(found, int) else self.token("<|media_pad|>")

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        pixels = pixels_of(media)
        height, width, _ = pixels.shape
        patches = (height // self.patch) * (width // self.patch)
        limit = int({**self.settings, **kwargs}["in_token_limit"])
        if patches > limit:
            scale = math.sqrt(limit / patches)
            height, width = max(int(height * scale), 1), max(int(width * scale), 1)
            pixels = resize(pixels, height, width, BICUBIC)
        cell = self.patch * self.merge
        rows, columns = -(-height // cell), -(-width // cell)
        if max(rows, columns) * self.merge >= MOST_SIDE:
            raise RequestError(
                f"an image has {width} x {height} pixels; a side must have less than "
                f"{MOST_SIDE * self.patch}"
            )
        pixels = pad(pixels, rows * cell, columns * cell)
        tensors = (
            to_tensor("pixels", pixels[None]),
            to_tensor("cells", np.zeros((rows, columns), np.uint8)),
            to_tensor("scale_shift", self.scale_shift),
        )
        return ProcessedMedia("image", tensors, {"grid": (rows, columns)})

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        rows, columns = media.sizes["grid"]
        ids, count = (self.image_id,), rows * columns
        return Expansion(ids * count, ((0, count),), replaces=ids)
