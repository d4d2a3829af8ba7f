"""CLIP: the state of the tower's class token, projected to an embedding.

Source: model_type "clip", https://huggingface.co/openai/clip-vit-base-patch32; transformers
        modeling_clip.py
"""

from __future__ import annotations

from torch import Tensor

from quire.layers import Linear
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import ImageEncoder, build_clip, tower_weights


class Encoder(ImageEncoder):
    makes_results = True
    has_graphs = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = build_clip(hf.get("vision_config") or {}, (-1,), last_norm=True)
        self.patches_per_row = self.tower.tokens
        self.width = field_of(hf, "projection_dim", int, default=512)
        self.projection = Linear(self.tower.config.hidden, self.width)
        names = {"visual_projection.weight": "projection.weight"}
        self.weights = tower_weights(self.tower, alias=names)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return 1

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        return self.projection(x[:, 0].contiguous()).unsqueeze(1)
