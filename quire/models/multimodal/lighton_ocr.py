"""LightOnOCR: the towers and the projector of Mistral 3, before Qwen3.

Source: model_type "lighton_ocr", https://huggingface.co/lightonai/LightOnOCR-1B-1025; transformers
modeling_lighton_ocr.py
"""

from __future__ import annotations

from quire.models.multimodal._base import Hf
from quire.models.multimodal.mistral3 import Encoder as Mistral3Encoder


class Encoder(Mistral3Encoder):
    @classmethod
    def from_hf(cls, hf: Hf) -> Mistral3Encoder:
        fixed = {
            "vision_config": {"hidden_act": "silu", **(hf.get("vision_config") or {})},
            "text_config": {"rms_norm_eps": 1e-6, **hf["text_config"]},
            "vision_feature_layer": -1,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": False,
        }
        return super().from_hf({**hf, **fixed})
