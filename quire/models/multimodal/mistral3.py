"""Mistral 3: Pixtral's tower, squares of 2 x 2 patches through one matrix, then an MLP.

Source: model_type "mistral3", https://huggingface.co/mistralai/Mistral-Small-3.1-24B-Instruct-2503;
transformers modeling_mistral3.py
"""

from __future__ import annotations

from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._pixtral import NativeSizeEncoder

VISION = {"image_size": 1540, "patch_size": 14}
"""What a vision section leaves out, where Pixtral's defaults are others."""


class Encoder(NativeSizeEncoder):
    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        vision = {**VISION, **(hf.get("vision_config") or {})}
        merge = field_of(hf, "spatial_merge_size", int, default=2)
        return cls({**hf, "vision_config": vision}, merge=merge)
