"""LLaVA-NeXT-Video: images as LLaVA-NeXT's; of a frame, states in squares of 2 x 2 are pooled.

Source: model_type "llava_next_video", https://huggingface.co/llava-hf/LLaVA-NeXT-Video-7B-hf;
        transformers modeling_llava_next_video.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, max_pool2d

from quire.kernels.framework import lazy_fusion
from quire.models.multimodal import llava_next
from quire.models.multimodal._base import EncoderInput, Hf, field_of
from quire.models.multimodal._towers import chosen_states

MAX_FRAMES = 32
"""Of a video."""
POOLS: dict[str, Callable[..., Tensor]] = {"average": avg_pool2d, "max": max_pool2d}


class Encoder(llava_next.Encoder):
    modalities: tuple[str, ...] = ("image", "video")

    def __init__(self, hf: Hf) -> None:
        super().__init__(hf)
        self.pool = POOLS[
            field_of(hf, "spatial_pool_mode", str, default="average", one_of=set(POOLS))
        ]
        self.stride = field_of(hf, "spatial_pool_stride", int, default=2)

    def max_rows(self, modality: str) -> int:
        if modality == "video":
            return MAX_FRAMES * (self.tower.config.grid[0] // self.stride) ** 2
        return super().max_rows(modality)

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """Videos have no `order`."""
        found: dict[int, Tensor] = {}
        for modality, encode in (("image", super().encode), ("video", self._encode_videos)):
            places = [i for i, one in enumerate(items) if one.modality == modality]
            if places:
                found |= dict(zip(places, encode([items[i] for i in places]), strict=True))
        return [found[i] for i in range(len(items))]

    def _encode_videos(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        x = chosen_states(self.states(items), self.skipped)
        side = math.isqrt(x.shape[1])
        lazy_fusion.flush()
        maps = x.transpose(1, 2).reshape(len(x), -1, side, side)
        pooled = self.pool(maps, self.stride, self.stride).flatten(2).transpose(1, 2)
        rows = self.projector(pooled.flatten(0, 1).contiguous()).view(*pooled.shape[:2], -1)
        lazy_fusion.flush()
        counts = [len(one.tensors["pixels"]) for one in items]
        return [own.flatten(0, 1) for own in torch.split(rows, counts)]
