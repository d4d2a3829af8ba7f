"""BLIP-2: states of a vision transformer, through a Q-Former, before the text of OPT or T5.

Source: model_type "blip-2", https://huggingface.co/Salesforce/blip2-opt-2.7b; transformers
        modeling_blip_2.py
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._qformer import QFORMER_NAMES, QFormer
from quire.models.multimodal._towers import (
    BLIP_ALIASES,
    ImageEncoder,
    build_blip,
    tower_weights,
)

VISION = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
"""What a vision section leaves out."""


class Encoder(ImageEncoder):
    def __init__(self, hf: Hf) -> None:
        super().__init__()
        queries = field_of(hf, "num_query_tokens", int, default=32)
        self.tower = build_blip({**VISION, **(hf.get("vision_config") or {})})
        self.qformer = QFormer(hf.get("qformer_config") or {}, queries)
        self.patches_per_row = -(-self.tower.tokens // queries)
        text = hf["text_config"]
        key = "d_model" if text.get("hidden_size") is None else "hidden_size"
        self.width = field_of(text, key, int)
        self.projection = Linear(self.qformer.hidden, self.width, bias=True)
        self.weights = tower_weights(
            self.tower,
            paths={**QFORMER_NAMES, "language_projection": "projection"},
            alias={**BLIP_ALIASES, "query_tokens": "qformer.queries.weight"},
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return len(self.qformer.queries.weight)

    def project(self, states: list[Tensor]) -> Tensor:
        (x,) = states
        rows: Tensor = self.projection(self.qformer(x))
        lazy_fusion.flush()
        return rows.view(len(x), -1, self.width)
