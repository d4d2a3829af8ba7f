"""Pixtral: a tower for images of any size, with rotary positions of rows and columns.

Axes: P patches of all images, E width of the tower, n rows, W hidden size of the text model
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    AddRMSNorm,
    EncoderAttention,
    Linear,
    PatchLinear,
    QKVLinear,
    RMSNorm,
    Rope,
    RopeConfig,
    add,
)
from quire.layers.rope import TokenAngles
from quire.layers.rope_scaling import SharedAxialRope
from quire.models._decoder import GatedMLP
from quire.models.base import field_of
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    Weights,
    normalized_patches,
)
from quire.models.multimodal._towers import MLPProjector, activation_of, text_hidden
from quire.models.multimodal._vit import Packing, VitConfig, vit_sizes

EPS = 1e-5
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": EPS,
}
"""What a vision section leaves out."""
NAMES = {
    "vision_tower.transformer": "tower",
    "vision_tower": "tower",
    "vision_encoder.transformer": "tower",
    "vision_encoder": "tower",
    "multi_modal_projector": "projector",
    "vision_projection": "projector",
    "patch_merger.merging_layer": "merging_layer",
}
"""Paths in checkpoints -> ours."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class RotaryVitLayer(nn.Module):
    def __init__(self, c: VitConfig, theta: float) -> None:
        super().__init__()
        size = c.hidden // c.heads
        self.attention_norm = AddRMSNorm(c.hidden, EPS)
        self.attention = nn.ModuleDict(
            {
                "qkv_proj": QKVLinear(c.hidden, c.heads, c.heads, size),
                "o_proj": Linear(c.hidden, c.hidden),
            }
        )
        axes = (0,) * (size // 4) + (1,) * (size // 4)
        config = RopeConfig(theta, size, SharedAxialRope(2), axes=axes)
        self.rope = Rope(config, max(c.grid))
        self.attn = EncoderAttention(size)
        self.ffn_norm = AddRMSNorm(c.hidden, EPS)
        self.feed_forward = GatedMLP(c.hidden, c.mlp, c.act)

    def forward(
        self, x: Tensor, res: Tensor | None, angles: TokenAngles, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """x [P, E] is what the layer before adds to the residual; so is the first result."""
        x, res = self.attention_norm(x, res)
        q, k, v = self.attention["qkv_proj"](x)  # each [P, H, D]
        q, k = self.rope(q, k, angles)
        x = self.attention["o_proj"](self.attn(q, k, v, packing.starts, packing.longest))
        x, res = self.ffn_norm(x, res)
        return self.feed_forward(x), res


class PixtralTower(nn.Module):
    """Layers up to the one whose states are asked for; wanted: as in Vit."""

    def __init__(self, hf: Hf, wanted: int) -> None:
        super().__init__()
        c = self.config = VitConfig(**vit_sizes(hf, **VISION))
        if c.hidden // c.heads % 4:
            raise ConfigError(
                f"config.json: heads of the vision tower have {c.hidden // c.heads} numbers; it "
                "must be a multiple of 4"
            )
        rope = {**hf, **(hf.get("rope_parameters") or {})}
        theta = field_of(rope, "rope_theta", float, default=10000.0)
        depth = wanted if wanted >= 0 else c.layers + 1 + wanted
        if not 0 < depth <= c.layers:
            raise ConfigError(
                f"config.json: vision_feature_layer is {wanted}; the vision tower has {c.layers} "
                "layers"
            )
        self.patch_conv = PatchLinear(c.channels, (c.patch, c.patch), c.hidden)
        self.ln_pre = RMSNorm(c.hidden, EPS)
        self.layers = nn.ModuleList(RotaryVitLayer(c, theta) for _ in range(depth))

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Patches [P, C * patch * patch] of images with these rows and columns -> [P, E]."""
        x, res = self.ln_pre(self.patch_conv(patches)), None
        packing = Packing.of([rows * columns for rows, columns in grids], x.device)
        first: Any = self.layers[0]
        angles = first.rope.gather(_positions(grids).to(x.device))
        for layer in self.layers:
            x, res = layer(x, res, angles, packing)
        return x if res is None else add(x, res)


def _positions(grids: Sequence[tuple[int, int]]) -> Tensor:
    """(row, column) of each patch: [2, P] int32."""
    with torch.device("cpu"):
        found: list[Any] = []
        for rows, columns in grids:
            at = torch.arange(rows * columns, dtype=torch.int32)
            found.append(torch.stack((at // columns, at % columns)))
        return torch.cat(found, dim=1)


class MergingProjector(MLPProjector):
    """A norm and a matrix over squares of patches before the MLP, if `merge` is above 1."""

    def __init__(
        self, inputs: int, outputs: int, act: str, bias: bool, merge: int = 1, eps: float = EPS
    ) -> None:
        super().__init__(inputs, outputs, outputs, act, bias)
        self.merge = merge
        self.norm = RMSNorm(inputs, eps) if merge > 1 else None
        self.merging_layer = Linear(inputs * merge**2, inputs) if merge > 1 else None

    def join(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """States [P, E] -> [n, W]."""
        if self.norm is not None and self.merging_layer is not None:
            x = self.norm(x)
            lazy_fusion.flush()
            m, sizes = self.merge, [rows * columns for rows, columns in grids]
            squares = [
                part.view(rows, columns, -1).unfold(0, m, m).unfold(1, m, m).flatten(2)
                for part, (rows, columns) in zip(x.split(sizes), grids, strict=True)
            ]
            x = self.merging_layer(torch.cat([one.flatten(0, 1) for one in squares]))
        return self(x)


class NativeSizeEncoder(MediaEncoder):
    """Encodes images of any size in whole patches.

    An item has the tensors
        pixels       uint8 [1, H, W, C]
        scale_shift  float32 [2, C], of normalization
    """

    modalities = ("image",)

    def __init__(self, hf: Hf, *, merge: int = 1) -> None:
        super().__init__()
        layer = field_of(hf, "vision_feature_layer", int, default=-1)
        self.tower = PixtralTower(hf.get("vision_config") or {}, layer)
        self.width, self.merge = text_hidden(hf), merge
        self.projector = MergingProjector(
            self.tower.config.hidden,
            self.width,
            activation_of(hf, "projector_hidden_act"),
            field_of(hf, "multimodal_projector_bias", bool, default=merge == 1),
            merge,
            field_of(hf["text_config"], "rms_norm_eps", float, default=EPS),
        )
        unused = range(len(self.tower.layers), self.tower.config.layers)
        self.weights = Weights(
            strip=("model.",),
            paths=NAMES,
            fuse=FUSED,
            ignore=("*.position_ids", "*.inv_freq"),
            absent=tuple(f"tower.layers.{i}." for i in unused),
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> NativeSizeEncoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        rows, columns = self.tower.config.grid
        return rows * columns // self.merge**2

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        dtype, patch = self.tower.ln_pre.weight.dtype, self.tower.config.patch
        sizes = [one.tensors["pixels"].shape[1:3] for one in items]
        grids = [(height // patch, width // patch) for height, width in sizes]
        patches = [
            normalized_patches(one.tensors["pixels"], one.tensors["scale_shift"], patch, dtype)
            for one in items
        ]
        rows = self.projector.join(self.tower(torch.cat(patches), grids), grids)
        lazy_fusion.flush()
        counts = [(rows // self.merge) * (columns // self.merge) for rows, columns in grids]
        return list(rows.split(counts))
