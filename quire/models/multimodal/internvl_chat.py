"""InternVL in the form of the hub, whose checkpoints have code of their own.

Source: model_type "internvl_chat", https://huggingface.co/OpenGVLab/InternVL3-8B
"""

from __future__ import annotations

from quire.models.multimodal import internvl
from quire.models.multimodal._base import Hf, field_of


class Encoder(internvl.Encoder):
    modalities = ("image",)
    hub = True

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        field_of(hf, "ps_version", str, default="v2", one_of={"v2"})
        layer = field_of(hf, "select_layer", int, default=-1)
        vision = dict(hf.get("vision_config") or {})
        if isinstance(side := hf.get("force_image_size"), int):
            vision["image_size"] = side
        return cls({**hf, "vision_config": vision, "vision_feature_layer": layer})
