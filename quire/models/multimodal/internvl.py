"""InternVL in the form of transformers: states of InternViT in squares of 2 x 2, through an MLP.

Source: model_type "internvl", https://huggingface.co/OpenGVLab/InternVL3-1B-hf; transformers
modeling_internvl.py
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._intern_vit import NormedProjector, build_intern_vit, intern_weights
from quire.models.multimodal._towers import (
    ImageEncoder,
    activation_of,
    chosen_states,
    feature_layers,
    merge_neighbours,
    skipped_tokens,
    text_hidden,
)

MAX_TILES = 13
"""Of an image: the tiles, and the thumbnail."""


class Encoder(ImageEncoder):
    hub: ClassVar[bool] = False  # names are those of checkpoints with code of their own

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.skipped = skipped_tokens(hf, "default")
        self.tower = build_intern_vit(hf.get("vision_config") or {}, feature_layers(hf, -1))
        ratio = field_of(hf, "downsample_ratio", float, default=0.5)
        self.factor = round(1 / ratio)
        self.width = text_hidden(hf)
        inputs = self.tower.config.hidden * self.factor**2
        act = activation_of(hf, "projector_hidden_act")
        self.projector = NormedProjector(inputs, self.width, act)
        self.weights = intern_weights(self.tower, hub=self.hub)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return (self.tower.tokens - self.skipped) // self.factor**2 * MAX_TILES

    def project(self, states: list[Tensor]) -> Tensor:
        x = merge_neighbours(chosen_states(states, self.skipped), self.factor)
        return self.projector(x.flatten(0, 1)).view(*x.shape[:2], -1)
