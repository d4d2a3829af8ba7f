"""Phi-4-multimodal: tiles of images through SigLIP.

Source: model_type "phi4_multimodal", https://huggingface.co/microsoft/Phi-4-multimodal-instruct;
        transformers modeling_phi4_multimodal.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._phi4_image import ImagePart
from quire.models.multimodal._towers import text_hidden

AT = "embed_tokens_extend"


class Encoder(MediaEncoder):
    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = field_of(hf, "vision_config", dict, default={})
        self.width = text_hidden(hf)
        layer = field_of(vision, "feature_layer", int, default=-2)
        self.image = ImagePart(vision, self.width, layer)
        self.weights = Weights(
            strip=("model.",),
            paths={
                f"{AT}.image_embed.img_processor.embeddings": "image.tower",
                f"{AT}.image_embed.img_processor.encoder.layers": "image.tower.layers",
                f"{AT}.image_embed.img_projection_up": "image.projector.linear_1",
                f"{AT}.image_embed.img_projection_down": "image.projector.linear_2",
            },
            alias={
                f"{outer}{AT}.image_embed.{theirs}": f"image.{ours}"
                for outer in ("", "model.")
                for theirs, ours in {
                    "global_img_feature_extensor": "global_mark.weight",
                    "sub_img_feature_extensor": "sub_mark.weight",
                }.items()
            },
            fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
            ignore=(
                "*.img_processor.head.*",
                "*.img_processor.post_layernorm.*",
                "*.audio_embed.*",
            ),
            absent=tuple(
                f"image.tower.layers.{i}."
                for i in range(len(self.image.tower.layers), self.image.tower.config.layers)
            ),
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.image.max_rows

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        return self.image.encode(items)
