"""Images of GLM-4V-9B: one of a fixed size. Its patches share one position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.media.image_ops import BICUBIC, resize
from quire.media.processor import (
    DecodedMedia,
    ExpandedItem,
    Expansion,
    ProcessedMedia,
    ProcessorFiles,
    Settings,
)
from quire.media.processors._pixels import CLIP, ImageProcessor, pixels_of

FORM = ("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")


class Processor(ImageProcessor):
    defaults = CLIP

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        vision: dict[str, Any] = files.config.get("vision_config") or {}
        self.side = int(vision.get("image_size") or 1120)
        self.patches = (self.side // int(vision.get("patch_size") or 14) // 2) ** 2

    def placeholder(self, modality: str, index: int) -> str:
        return "".join(FORM)

    def process(self, media: DecodedMedia, kwargs: Settings) -> ProcessedMedia:
        return self.item([resize(pixels_of(media), self.side, self.side, BICUBIC)])

    def expand(self, media: ProcessedMedia, index: int) -> Expansion:
        first, patch, last = form = tuple(self.token(one) for one in FORM)
        ids = (first, *(patch,) * self.patches, last)
        return Expansion(ids, ((0, len(ids)),), replaces=form)

    def rope(
        self, ids: Sequence[int], items: Sequence[ExpandedItem]
    ) -> tuple[npt.NDArray[np.int32], int] | None:
        if not items:
            return None
        steps = np.ones(len(ids), np.int32)
        steps[0] = 0
        for item in items:
            steps[item.start + 2 : item.start + 1 + self.patches] = 0
        positions = np.cumsum(steps, dtype=np.int32)
        return np.tile(positions, (3, 1)), int(positions[-1]) + 1 - len(ids)
