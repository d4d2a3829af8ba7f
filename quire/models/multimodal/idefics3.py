"""Idefics 3: tiles through SigLIP, states in squares of 2 x 2 or more, through one matrix.

Source: model_type "idefics3", https://huggingface.co/HuggingFaceM4/Idefics3-8B-Llama3; transformers
modeling_idefics3.py
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers import Linear
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import (
    ImageEncoder,
    build_siglip,
    merge_neighbours,
    text_hidden,
    tower_weights,
)

VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
"""What a vision section leaves out."""
MAX_TILES = 37
"""Of an image: rows and columns have names up to 6; and the whole of it."""


class Encoder(ImageEncoder):
    has_graphs = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = {**VISION, **(hf.get("vision_config") or {})}
        self.tower = build_siglip(vision, fractions=True)
        self.factor = field_of(hf, "scale_factor", int, default=2)
        self.width = text_hidden(hf)
        inputs = self.tower.config.hidden * self.factor**2
        self.projector = nn.ModuleDict({"proj": Linear(inputs, self.width)})
        names = {"connector.modality_projection": "projector"}
        self.weights = tower_weights(self.tower, paths=names)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.tower.tokens // self.factor**2 * MAX_TILES

    def project(self, states: list[Tensor]) -> Tensor:
        x = merge_neighbours(states[0], self.factor)
        rows: Tensor = self.projector["proj"](x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)
