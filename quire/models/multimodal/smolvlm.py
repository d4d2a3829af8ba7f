"""SmolVLM 1 and 2: Idefics 3 with smaller parts, and videos, whose frames are whole images.

Source: model_type "smolvlm", https://huggingface.co/HuggingFaceTB/SmolVLM2-2.2B-Instruct;
transformers modeling_smolvlm.py
"""

from __future__ import annotations

from quire.models.multimodal import idefics3

MAX_FRAMES = 64
"""Of a video."""


class Encoder(idefics3.Encoder):
    modalities: tuple[str, ...] = ("image", "video")

    def max_rows(self, modality: str) -> int:
        if modality != "video":
            return super().max_rows(modality)
        return self.tower.tokens // self.factor**2 * MAX_FRAMES
