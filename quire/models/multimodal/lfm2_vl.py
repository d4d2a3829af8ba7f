"""LFM2-VL: SigLIP 2 over tiles and a thumbnail of any shape; four patches make a row.

Source: model_type "lfm2_vl", https://huggingface.co/LiquidAI/LFM2-VL-1.6B;
        transformers modeling_lfm2_vl.py
Axes:   R rows and C columns of patches of an image, E hidden of the tower
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._siglip2 import TOWER_PATHS, NaflexTower
from quire.models.multimodal._towers import QKV, MLPProjector, activation_of, text_hidden

LARGEST = 11 * 256
"""Rows of ten tiles and a thumbnail, of 512 x 512 pixels each."""
VISION = {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}
"""What a vision section leaves out."""


class UnshuffleProjector(MLPProjector):
    """An MLP of neighbouring patches, after a norm where the config has one."""

    def __init__(self, hf: Hf, factor: int, inputs: int, outputs: int) -> None:
        hidden = field_of(hf, "projector_hidden_size", int, default=2560)
        bias = field_of(hf, "projector_bias", bool, default=True)
        super().__init__(inputs, hidden, outputs, activation_of(hf, "projector_hidden_act"), bias)
        normed = field_of(hf, "projector_use_layernorm", bool, default=True)
        self.layer_norm: nn.Module = LayerNorm(inputs, 1e-5) if normed else nn.Identity()
        self.factor = factor

    def merge(self, x: Tensor) -> Tensor:
        """Join squares of neighbouring patches: [R, C, E] -> [R * C / f², f² * E]."""
        rows, columns, size = x.shape
        factor = self.factor
        cells = x.view(rows // factor, factor, columns // factor, factor, size).transpose(1, 2)
        return cells.reshape(-1, factor**2 * size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer_norm(x))


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = NaflexTower({**VISION, **(hf.get("vision_config") or {})})
        self.width = text_hidden(hf)
        factor = field_of(hf, "downsample_factor", int, default=2)
        self.patches_per_row = factor**2
        inputs = self.tower.config.hidden * factor**2
        self.projector = UnshuffleProjector(hf, factor, inputs, self.width)
        tower = {f"vision_tower.{one}": f"tower.{ours}" for one, ours in TOWER_PATHS.items()}
        tower |= {one.replace("vision_model.", ""): ours for one, ours in tower.items()}
        self.weights = Weights(
            strip=("model.",),
            paths={**tower, "multi_modal_projector": "projector"},
            fuse=QKV,
            ignore=("*vision*.head.*",),
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return LARGEST

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """tiles uint8 [N, H, W, 3] and pixels uint8 [H, W, 3], of which one may be missing, and
        scale_shift float32 [2, 3]."""
        images, counts = [], []
        for one in items:
            own = [
                *one.tensors.get("tiles", ()),
                *[one.tensors[k] for k in ("pixels",) if k in one.tensors],
            ]
            images += [(pixels, one.tensors["scale_shift"]) for pixels in own]
            counts.append(len(own))
        states, shapes = self.tower(images)
        lazy_fusion.flush()
        parts = states.split([rows * columns for rows, columns in shapes])
        merged = [self.projector.merge(one.view(*shape, -1)) for one, shape in zip(parts, shapes)]
        rows = self.projector(torch.cat(merged))
        lazy_fusion.flush()
        lengths = iter([len(one) for one in merged])
        return list(rows.split([sum(next(lengths) for _ in range(count)) for count in counts]))
