"""GOT-OCR 2: SAM's tower over tiles, then two convolutions that halve its map, and a matrix.

Most layers of the tower attend within windows. Scores have terms of the distance in rows and in
columns, which depend on the query.

Source: model_type "got_ocr2", https://huggingface.co/stepfun-ai/GOT-OCR-2.0-hf; transformers
        modeling_got_ocr2.py
Axes:   N tiles or windows, R rows and C columns of patches, T = R * C, E width of the tower,
        H heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ACTIVATION_KINDS, Activation, LayerNorm, Linear, ParamModule, PatchLinear
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    Weights,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._towers import text_hidden
from quire.models.multimodal._vit import Learned
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

MAX_TILES = 13
"""Of an image: the tiles, and the thumbnail."""
NECK_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamConfig:
    hidden: int
    layers: int
    heads: int
    mlp: int
    act: str
    eps: float
    side: int  # patches along a side of a tile
    patch: int
    window: int
    whole: frozenset[int]  # layers that attend to the whole tile
    channels: int  # of the tower's map
    bias: bool


def sam_config(hf: Hf) -> SamConfig:
    """Read a vision section. Raises ConfigError."""
    for name in ("use_abs_pos", "use_rel_pos"):
        field_of(hf, name, bool, default=True, one_of={True})
    hidden = field_of(hf, "hidden_size", int, default=768)
    heads = field_of(hf, "num_attention_heads", int, default=12)
    image = field_of(hf, "image_size", int, default=1024)
    patch = field_of(hf, "patch_size", int, default=16)
    if hidden % heads or image % patch:
        raise ConfigError(
            f"config.json: of the vision tower, num_attention_heads ({heads}) must divide "
            f"hidden_size ({hidden}), and patch_size ({patch}) image_size ({image})"
        )
    act = field_of(hf, "hidden_act", str, default="gelu", one_of=ACTIVATION_KINDS)
    return SamConfig(
        hidden=hidden,
        layers=field_of(hf, "num_hidden_layers", int, default=12),
        heads=heads,
        mlp=field_of(hf, "mlp_dim", int, default=3072),
        act=act,
        eps=field_of(hf, "layer_norm_eps", float, default=1e-6),
        side=image // patch,
        patch=patch,
        window=field_of(hf, "window_size", int, default=14),
        whole=frozenset(field_of(hf, "global_attn_indexes", list, default=[2, 5, 8, 11])),
        channels=field_of(hf, "output_channels", int, default=256),
        bias=field_of(hf, "qkv_bias", bool, default=True),
    )


class SamAttention(ParamModule):
    rel_pos_h: Tensor
    rel_pos_w: Tensor

    def __init__(self, c: SamConfig, side: int) -> None:
        """side: patches along a side of what a token attends to."""
        super().__init__()
        self.side, self.heads, self.size = side, c.heads, c.hidden // c.heads
        self.qkv = Linear(c.hidden, 3 * c.hidden, bias=c.bias)
        self.proj = Linear(c.hidden, c.hidden, bias=True)
        self.declare("rel_pos_h", "rel_pos_w")

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N * R * C, E]."""
        count, rows, columns, _ = x.shape
        qkv = self.qkv(x.flatten(0, 2))
        lazy_fusion.flush()
        q, k, v = qkv.view(count, rows * columns, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        down, across = self._distances(self.rel_pos_h), self._distances(self.rel_pos_w)
        grid = q.unflatten(2, (rows, columns))  # [N, H, R, C, D]
        by_row = torch.einsum("nhrcd,rkd->nhrck", grid, down).flatten(2, 3)
        by_column = torch.einsum("nhrcd,ckd->nhrck", grid, across).flatten(2, 3)
        # A term for each row and column of keys is a product with a key that names its own.
        q = torch.cat((q * self.size**-0.5, by_row, by_column), dim=-1)
        own = torch.eye(self.side, dtype=k.dtype, device=k.device)
        names = torch.cat(
            (own[:, None].expand(-1, columns, -1), own[None].expand(rows, -1, -1)), dim=-1
        )
        names = names.flatten(0, 1).expand(count, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat((k, names), dim=-1), v, scale=1.0)
        return self.proj(y.transpose(1, 2).reshape(count * rows * columns, -1))

    def _distances(self, table: Tensor) -> Tensor:
        """Vectors of the distance from query to key along an axis: [side, side, D]."""
        at = torch.arange(self.side, device=table.device)
        return table[at[:, None] - at + self.side - 1]

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((2 * self.side - 1, self.size))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.02)


class SamMLP(nn.Module):
    def __init__(self, c: SamConfig) -> None:
        super().__init__()
        self.lin1, self.lin2 = (
            Linear(c.hidden, c.mlp, bias=True),
            Linear(c.mlp, c.hidden, bias=True),
        )
        self.act = Activation(c.act)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(self.act(self.lin1(x)))


class SamLayer(nn.Module):
    def __init__(self, c: SamConfig, layer: int) -> None:
        super().__init__()
        self.window = 0 if layer in c.whole else c.window
        self.layer_norm1, self.layer_norm2 = (LayerNorm(c.hidden, c.eps) for _ in range(2))
        self.attn = SamAttention(c, self.window or c.side)
        self.mlp = SamMLP(c)

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E], the map of each tile."""
        y = self.layer_norm1(x.flatten(0, 2))
        lazy_fusion.flush()
        x = x + self._attended(y.view(x.shape))
        y = self.mlp(self.layer_norm2(x.flatten(0, 2)))
        lazy_fusion.flush()
        return x + y.view(x.shape)

    def _attended(self, x: Tensor) -> Tensor:
        count, rows, columns, width = x.shape
        if not self.window:
            y = self.attn(x)
            lazy_fusion.flush()
            return y.view(x.shape)
        # Windows at the edges are filled with zeros, which are keys and values like others.
        w = self.window
        padded = F.pad(x, (0, 0, 0, -columns % w, 0, -rows % w))
        tall, wide = padded.shape[1] // w, padded.shape[2] // w
        cut = padded.view(count, tall, w, wide, w, width).transpose(2, 3)
        y = self.attn(cut.reshape(-1, w, w, width))
        lazy_fusion.flush()
        y = y.view(count, tall, wide, w, w, width).transpose(2, 3)
        return y.reshape(padded.shape)[:, :rows, :columns]


class ConvNeck(nn.Module):
    """Two convolutions, each with a norm of the channels of every place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = Learned(outputs, inputs, 1, 1), Learned(outputs, outputs, 3, 3)
        self.layer_norm1, self.layer_norm2 = (LayerNorm(outputs, NECK_EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N, outputs, R, C]."""
        x = self._normed(F.conv2d(x.permute(0, 3, 1, 2), self.conv1.weight), self.layer_norm1)
        return self._normed(F.conv2d(x, self.conv2.weight, padding=1), self.layer_norm2)

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        places = x.permute(0, 2, 3, 1).contiguous()
        y = norm(places.flatten(0, 2))
        lazy_fusion.flush()
        return y.view(places.shape).permute(0, 3, 1, 2)


class SamTower(nn.Module):
    def __init__(self, hf: Hf) -> None:
        super().__init__()
        c = self.config = sam_config(hf)
        self.patch_embed = PatchLinear(3, (c.patch, c.patch), c.hidden, True)
        self.positions = Learned(c.side, c.side, c.hidden)
        self.layers = nn.ModuleList(SamLayer(c, i) for i in range(c.layers))
        self.neck = ConvNeck(c.hidden, c.channels)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [N * T, 3 * patch * patch] -> [N, channels, R, C]."""
        x = self.patch_embed(patches)
        lazy_fusion.flush()
        x = x.view(-1, self.config.side, self.config.side, x.shape[1]) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.neck(x)
        return found


class HalvingProjector(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv_upsampler1 = Learned(2 * channels, channels, 3, 3)
        self.conv_upsampler2 = Learned(width, 2 * channels, 3, 3)
        self.multimodal_projector = Linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, R, C] -> [N, R / 4 * C / 4, width]."""
        for conv in (self.conv_upsampler1, self.conv_upsampler2):
            x = F.conv2d(x, conv.weight, stride=2, padding=1)
        places = x.flatten(2).transpose(1, 2)
        rows: Tensor = self.multimodal_projector(places.flatten(0, 1))
        lazy_fusion.flush()
        return rows.view(places.shape)


class Encoder(MediaEncoder):
    """An item has the tensors pixels, uint8 [N, H, W, 3] of tiles, and scale_shift [2, 3]."""

    modalities: tuple[str, ...] = ("image",)
    patches_per_row = 16

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.tower = SamTower(hf.get("vision_config") or {})
        self.width = text_hidden(hf)
        self.projector = HalvingProjector(self.tower.config.channels, self.width)
        self.rows = (-(-self.tower.config.side // 4)) ** 2
        self.weights = Weights(
            strip=("model.",),
            paths={
                "vision_tower.patch_embed.projection": "tower.patch_embed",
                "vision_tower": "tower",
                "multi_modal_projector": "projector",
            },
            alias={
                f"{outer}vision_tower.pos_embed": "tower.positions.weight"
                for outer in ("", "model.")
            },
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.rows * MAX_TILES

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        dtype, patch = self.tower.positions.weight.dtype, self.tower.config.patch
        found = []
        for one in items:  # scores of the whole tile are large
            tiles = one.tensors["pixels"].split(1)
            scale_shift = one.tensors["scale_shift"]
            found.append(
                torch.cat(
                    [
                        self.projector(
                            self.tower(normalized_patches(tile, scale_shift, patch, dtype))
                        )[0]
                        for tile in tiles
                    ]
                )
            )
        return found
