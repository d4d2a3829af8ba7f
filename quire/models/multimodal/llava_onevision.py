"""LLaVA-OneVision: LLaVA-NeXT with SigLIP and larger images, which are shrunk; and video.

Source: model_type "llava_onevision", https://huggingface.co/llava-hf/llava-onevision-qwen2-7b-ov-hf;
transformers modeling_llava_onevision.py
"""

from __future__ import annotations

import math
from typing import ClassVar

from quire.models.multimodal import llava_next
from quire.models.multimodal._base import Hf, field_of

MAX_FRAMES = 32
"""Of a video."""
LEAST_RATIO = 1.1
"""Of sides, above which rows are shrunk to those of the most tiles."""


class Encoder(llava_next.Encoder):
    modalities = ("image", "video")
    vision: ClassVar = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    }
    layer = -1
    strategy = "full"
    pinpoints = tuple((384 * y, 384 * x) for y in range(1, 7) for x in range(1, 7))

    def __init__(self, hf: Hf) -> None:
        super().__init__(hf)
        stated = field_of(hf, "vision_aspect_ratio", str, default="anyres_max_9")
        self.most = int(stated.removeprefix("anyres_max_"))  # tiles, by their rows

    def max_rows(self, modality: str) -> int:
        side = self.tower.config.grid[0]
        if modality == "video":
            return MAX_FRAMES * ((side + 1) // 2) ** 2 + 1
        unshrunk = int(LEAST_RATIO**2 * self.most * side**2)
        lines = side * math.isqrt(self.largest) // self.tower.config.image[0] * 2
        return min(super().max_rows(modality), side**2 + unshrunk + lines)
