"""LLaVA 1.5, Pixtral and others of the class: states of a vision tower, through an MLP.

Source: model_type "llava", https://huggingface.co/llava-hf/llava-1.5-7b-hf; transformers
modeling_llava.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.models.multimodal._base import Hf, MediaEncoder, field_of
from quire.models.multimodal._pixtral import NativeSizeEncoder
from quire.models.multimodal._towers import (
    ImageEncoder,
    MLPProjector,
    activation_of,
    build_tower,
    chosen_states,
    feature_layers,
    skipped_tokens,
    text_hidden,
    tower_weights,
)

VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""What a vision section leaves out."""


class Encoder(ImageEncoder):
    """Others of the kind have other defaults."""

    has_graphs = True
    vision: ClassVar[Mapping[str, Any]] = VISION
    layer: ClassVar[int] = -2
    strategy: ClassVar[str] = "default"
    projector: nn.Module

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        layers = feature_layers(hf, self.layer)
        self.skipped = skipped_tokens(hf, self.strategy)
        self.tower = build_tower({**self.vision, **(hf.get("vision_config") or {})}, layers)
        self.width = text_hidden(hf)
        self.projector = MLPProjector(
            self.tower.config.hidden * len(layers),
            self.width,
            self.width,
            activation_of(hf, "projector_hidden_act"),
            field_of(hf, "multimodal_projector_bias", bool, default=True),
        )
        self.weights = tower_weights(self.tower)

    @classmethod
    def from_hf(cls, hf: Hf) -> MediaEncoder:
        if (hf.get("vision_config") or {}).get("model_type") == "pixtral":
            return NativeSizeEncoder(hf)
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.tower.tokens - self.skipped

    def project(self, states: list[Tensor]) -> Tensor:
        x = chosen_states(states, self.skipped)
        return self.projector(x.flatten(0, 1)).view(*x.shape[:2], -1)
