"""SigLIP: the states of the tower, pooled by attention.

Source: model_type "siglip", https://huggingface.co/google/siglip-so400m-patch14-384; transformers
        modeling_siglip.py
"""

from __future__ import annotations

from torch import Tensor

from quire.models.multimodal._attention_pool import POOL_ALIASES, POOL_PATHS, AttentionPool
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._towers import ImageEncoder, build_siglip, tower_weights


class Encoder(ImageEncoder):
    makes_results = True

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = hf.get("vision_config") or {}
        field_of(vision, "vision_use_head", bool, default=True, one_of={True})
        self.tower = build_siglip(vision)
        self.patches_per_row = self.tower.tokens
        self.width = self.tower.config.hidden
        self.pool = AttentionPool(self.tower.config)
        self.weights = tower_weights(
            self.tower, paths=POOL_PATHS, alias=POOL_ALIASES, used=("*vision*.head.*",)
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return 1

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        count, tokens, _ = x.shape
        pooled: Tensor = self.pool(x.flatten(0, 1), [tokens] * count)
        return pooled.unsqueeze(1)
