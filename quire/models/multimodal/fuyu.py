"""Fuyu: one matrix makes an embedding of each patch of an image.

Source: model_type "fuyu", https://huggingface.co/adept/fuyu-8b; transformers modeling_fuyu.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._towers import text_hidden

LARGEST = (1080, 1920)
"""Height and width in pixels of the largest image of the published model."""


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)
    patches_per_row = 1

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.patch = field_of(hf, "patch_size", int, default=30)
        self.width = text_hidden(hf)
        inputs = self.patch**2 * field_of(hf, "num_channels", int, default=3)
        self.vision_embed_tokens = Linear(inputs, self.width, bias=True)
        self.weights = Weights(strip=("model.",))

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        height, width = LARGEST
        return -(-height // self.patch) * -(-width // self.patch)

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels uint8 [H, W, 3], whose sides are multiples of a patch; scale_shift [2, 3]."""
        cut = [self._patches(one) for one in items]
        bias = self.vision_embed_tokens.bias
        assert bias is not None
        rows = self.vision_embed_tokens(torch.cat(cut).to(bias.dtype))
        lazy_fusion.flush()
        return list(rows.split([len(one) for one in cut]))

    def _patches(self, item: EncoderInput) -> Tensor:
        """Return normalized patches [n, patch * patch * 3], row by row, channels last."""
        scale, shift = item.tensors["scale_shift"]
        pixels, size = item.tensors["pixels"] * scale + shift, self.patch
        height, width, channels = pixels.shape
        cut = pixels.view(height // size, size, width // size, size, channels)
        return cut.transpose(1, 2).reshape(-1, size * size * channels)
