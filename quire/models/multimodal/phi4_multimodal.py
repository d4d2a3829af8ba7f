"""Phi-4-multimodal: tiles of images through SigLIP, recordings through a Conformer.

Source: model_type "phi4_multimodal", https://huggingface.co/microsoft/Phi-4-multimodal-instruct;
        transformers modeling_phi4_multimodal.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._phi4_audio import AUDIO_PATHS, AudioPart, audio_names
from quire.models.multimodal._phi4_image import ImagePart
from quire.models.multimodal._towers import text_hidden

AT = "embed_tokens_extend"


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image", "audio")

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        vision = field_of(hf, "vision_config", dict, default={})
        self.width = text_hidden(hf)
        layer = field_of(vision, "feature_layer", int, default=-2)
        self.image = ImagePart(vision, self.width, layer)
        self.audio = AudioPart(field_of(hf, "audio_config", dict, default={}), self.width)
        c = self.audio.config
        alias = {
            "image_embed.global_img_feature_extensor": "image.global_mark.weight",
            "image_embed.sub_img_feature_extensor": "image.sub_mark.weight",
        }
        for theirs, ours in audio_names(c.layers, int(math.log2(c.reduction))).items():
            alias[f"audio_embed.{theirs}"] = f"audio.{ours}"
        kept = len(self.image.tower.layers)
        left = range(kept, self.image.tower.config.layers)
        self.weights = Weights(
            strip=("model.",),
            paths={
                f"{AT}.image_embed.img_processor.embeddings": "image.tower",
                f"{AT}.image_embed.img_processor.encoder.layers": "image.tower.layers",
                f"{AT}.image_embed.img_projection_up": "image.projector.linear_1",
                f"{AT}.image_embed.img_projection_down": "image.projector.linear_2",
            }
            | {f"{AT}.audio_embed.{one}": f"audio.{to}" for one, to in AUDIO_PATHS.items()},
            alias={
                f"{outer}{AT}.{one}": to for outer in ("", "model.") for one, to in alias.items()
            },
            fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
            ignore=("*.img_processor.head.*", "*.img_processor.post_layernorm.*"),
            absent=tuple(f"image.tower.layers.{i}." for i in left),
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.image.max_rows if modality == "image" else self.audio.max_rows

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for modality, part in (("image", self.image), ("audio", self.audio)):
            places = [i for i, one in enumerate(items) if one.modality == modality]
            if places:
                rows = part.encode([items[i] for i in places])
                found |= dict(zip(places, rows, strict=True))
        return [found[i] for i in range(len(items))]
