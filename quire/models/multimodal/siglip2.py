"""SigLIP 2 for images of any shape: the states of its tower, pooled.

Source: model_type "siglip2", https://huggingface.co/google/siglip2-base-patch16-naflex;
        transformers modeling_siglip2.py
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.models.multimodal._attention_pool import POOL_ALIASES, POOL_PATHS, AttentionPool
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._siglip2 import TOWER_PATHS, NaflexTower
from quire.models.multimodal._towers import QKV

MAX_PATCHES = 1024
"""Of an image; quire.media.processors.siglip2 makes no more."""
NAMES = {**POOL_PATHS, **{theirs: f"tower.{ours}" for theirs, ours in TOWER_PATHS.items()}}


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)
    makes_results = True
    patches_per_row = MAX_PATCHES

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = hf.get("vision_config") or {}
        field_of(vision, "vision_use_head", bool, default=True, one_of={True})
        self.tower = NaflexTower(vision)
        self.width = self.tower.config.hidden
        self.pool = AttentionPool(self.tower.config)
        self.weights = Weights(paths=NAMES, alias=POOL_ALIASES, fuse=QKV)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return 1

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels uint8 [H, W, C], whose sides are multiples of a patch; scale_shift [2, C]."""
        images = [(one.tensors["pixels"], one.tensors["scale_shift"]) for one in items]
        states, shapes = self.tower(images)
        pooled = self.pool(states, [rows * columns for rows, columns in shapes])
        return list(pooled.split(1))
