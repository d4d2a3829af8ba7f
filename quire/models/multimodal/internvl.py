"""InternVL in the form of transformers: states of InternViT in squares of 2 x 2, through an MLP.

Source: model_type "internvl", https://huggingface.co/OpenGVLab/InternVL3-1B-hf; transformers
modeling_internvl.py
"""

from __future__ import annotations

from typing import ClassVar

from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._intern_vit import NormedProjector, build_intern_vit, intern_weights
from quire.models.multimodal._towers import (
    TileEncoder,
    activation_of,
    feature_layers,
    skipped_tokens,
    text_hidden,
)

MAX_FRAMES = 32
"""Of a video."""


class Encoder(TileEncoder):
    modalities: tuple[str, ...] = ("image", "video")
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
        self.projector = NormedProjector(inputs, self.width, self.width, act)
        self.weights = intern_weights(self.tower, hub=self.hub)

    def max_rows(self, modality: str) -> int:
        tiles = MAX_FRAMES if modality == "video" else self.max_tiles
        return (self.tower.tokens - self.skipped) // self.factor**2 * tiles

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)
