"""BLIP, captioning: the states of a vision transformer, which the text decoder attends to.

Source: model_type "blip", https://huggingface.co/Salesforce/blip-image-captioning-base;
        transformers modeling_blip.py
"""

from __future__ import annotations

from torch import Tensor

from quire.models.multimodal._base import Hf
from quire.models.multimodal._towers import BLIP_ALIASES, ImageEncoder, build_blip, tower_weights

VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
"""What a vision section leaves out."""


class Encoder(ImageEncoder):
    has_graphs = True
    patches_per_row = 1

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_blip({**VISION, **(hf.get("vision_config") or {})})
        self.width = self.tower.config.hidden
        self.weights = tower_weights(self.tower, alias=BLIP_ALIASES)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.tower.tokens

    def project(self, states: list[Tensor]) -> Tensor:
        return states[0]
