"""PaliGemma 1 and 2: states of SigLIP, through one matrix. The prefix of a prompt is bidirectional.

Source: model_type "paligemma", https://huggingface.co/google/paligemma2-3b-mix-224; transformers
modeling_paligemma.py
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers import Linear
from quire.models.multimodal._base import Hf
from quire.models.multimodal._towers import (
    ImageEncoder,
    build_siglip,
    text_hidden,
    tower_weights,
)

VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
"""What a vision section leaves out."""


class Encoder(ImageEncoder):
    has_graphs = True
    bidirectional = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_siglip({**VISION, **(hf.get("vision_config") or {})})
        self.width = text_hidden(hf)
        self.projector = nn.ModuleDict(
            {"linear": Linear(self.tower.config.hidden, self.width, bias=True)}
        )
        self.weights = tower_weights(self.tower)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.tower.tokens

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        rows: Tensor = self.projector["linear"](x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)
