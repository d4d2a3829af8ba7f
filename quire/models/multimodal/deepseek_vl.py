"""DeepSeek-VL: states of SigLIP, through an MLP.

Source: model_type "deepseek_vl", https://huggingface.co/deepseek-community/deepseek-vl-1.3b-chat;
transformers modeling_deepseek_vl.py
"""

from __future__ import annotations

from torch import Tensor

from quire.models.multimodal._base import Hf
from quire.models.multimodal._towers import (
    ImageEncoder,
    MLPProjector,
    build_siglip,
    text_hidden,
    tower_weights,
)


class Encoder(ImageEncoder):
    has_graphs = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_siglip(hf.get("vision_config") or {})
        self.width = text_hidden(hf)
        self.projector = MLPProjector(self.tower.config.hidden, self.width, self.width)
        paths = {
            "vision_model.vision_model": "tower",
            "aligner.linear1": "projector.linear_1",
            "aligner.linear2": "projector.linear_2",
        }
        self.weights = tower_weights(self.tower, paths=paths)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.tower.tokens

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        rows: Tensor = self.projector(x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)
