"""Llama-3.2-Vision: a vision transformer over all tiles of an image, and a second one over it.

    tiles -> patches + positions -> layers, some states kept -> gated global layers
          -> [last state, kept states] W

An image is padded to `tiles` tiles, and each of them to a multiple of 8 patches. Padding attends to
patches of the image, and they to it: only pairs of padding are masked. So it is computed too,
behind the others.

Source: model_type "mllama", https://huggingface.co/meta-llama/Llama-3.2-11B-Vision;
        transformers modeling_mllama.py
Axes:   N tiles and n patches of one, a class token included; P with padding; E hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    LayerNorm,
    Linear,
    ParamModule,
    PatchLinear,
    QKVLinear,
)
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    Weights,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._towers import QKV, text_hidden
from quire.models.multimodal._vit import Learned, VitMLP
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

EPS = 1e-5
"""Of the norms around the layers; config.json has that of the layers."""
MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class TileTowerConfig:
    """Sizes of both transformers."""

    hidden: int
    heads: int
    mlp: int
    act: str
    eps: float
    image: int  # pixels of a side of a tile
    patch: int
    tiles: int
    ratios: int  # aspect ratios with positions of their own, and one for none
    layers: int
    global_layers: int
    kept: tuple[int, ...]  # layers whose states are kept, from 0

    @classmethod
    def from_hf(cls, hf: Hf) -> TileTowerConfig:
        found = cls(
            hidden=field_of(hf, "hidden_size", int, default=1280),
            heads=field_of(hf, "attention_heads", int, default=16),
            mlp=field_of(hf, "intermediate_size", int, default=5120),
            act=field_of(hf, "hidden_act", str, default="gelu", one_of=ACTIVATION_KINDS),
            eps=field_of(hf, "norm_eps", float, default=1e-5),
            image=field_of(hf, "image_size", int, default=448),
            patch=field_of(hf, "patch_size", int, default=14),
            tiles=field_of(hf, "max_num_tiles", int, default=4),
            ratios=len(field_of(hf, "supported_aspect_ratios", list, default=[None] * 8)) + 1,
            layers=field_of(hf, "num_hidden_layers", int, default=32),
            global_layers=field_of(hf, "num_global_layers", int, default=8),
            kept=tuple(
                field_of(hf, "intermediate_layers_indices", list, default=[3, 7, 15, 23, 30])
            ),
        )
        if not set(found.kept) <= set(range(found.layers)):
            raise ConfigError(
                f"config.json: intermediate_layers_indices is {list(found.kept)!r:.80}; the vision "
                f"tower has {found.layers} layers"
            )
        if found.hidden % found.heads or not 0 < found.patch <= found.image:
            raise ConfigError(
                f"config.json: attention_heads of the vision tower ({found.heads}) must divide "
                f"hidden_size ({found.hidden}), and patch_size ({found.patch}) must not be above "
                f"image_size ({found.image})"
            )
        return found

    @property
    def patches(self) -> int:
        """Of a tile, with the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def padded(self) -> int:
        """Patches of a tile, with padding."""
        return -(-self.patches // MULTIPLE) * MULTIPLE


class TileAttention(nn.Module):
    """Attention over all tiles of an image, whose first `count` patches are no padding."""

    def __init__(self, c: TileTowerConfig) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.heads, c.hidden // c.heads)
        self.o_proj = Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, count: int) -> Tensor:
        found = self.qkv_proj(x)
        lazy_fusion.flush()
        q, k, v = (one.transpose(0, 1)[None] for one in found)  # each [1, H, N * P, D]
        own = scaled_dot_product_attention(q[:, :, :count], k, v)
        padding = scaled_dot_product_attention(q[:, :, count:], k[:, :, :count], v[:, :, :count])
        y = torch.cat((own, padding), dim=2)[0].transpose(0, 1)
        return self.o_proj(y.reshape(x.shape))


class TileTowerLayer(ParamModule):
    gate_attn: Tensor
    gate_ffn: Tensor

    def __init__(self, c: TileTowerConfig, *, gated: bool) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden, c.eps)
        self.self_attn = TileAttention(c)
        self.post_attention_layernorm = LayerNorm(c.hidden, c.eps)
        self.mlp = VitMLP(c.hidden, c.mlp, c.act)
        self.gated = gated
        if gated:
            self.declare("gate_attn", "gate_ffn")

    def forward(self, x: Tensor, count: int) -> Tensor:
        """x [N * P, E], of which the first `count` are no padding."""
        y = self.self_attn(self.input_layernorm(x), count)
        lazy_fusion.flush()
        x = x + (y * self.gate_attn.tanh() if self.gated else y)
        y = self.mlp(self.post_attention_layernorm(x))
        lazy_fusion.flush()
        return x + (y * self.gate_ffn.tanh() if self.gated else y)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((1,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.5, 0.1)


class Transformer(nn.Module):
    def __init__(self, c: TileTowerConfig, count: int, *, gated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TileTowerLayer(c, gated=gated) for _ in range(count))

    def forward(self, x: Tensor, count: int) -> list[Tensor]:
        """Return the states after each layer."""
        found = []
        for layer in self.layers:
            found.append(x := layer(x, count))
        return found


class GatedTable(ParamModule):
    """Vectors by aspect ratio, and the gate before them."""

    gate: Tensor

    def __init__(self, ratios: int, size: int) -> None:
        super().__init__()
        self.embedding = Learned(ratios, size)
        self.declare("gate")

    def forward(self, ratio: Tensor, tiles: int) -> Tensor:
        """Return what is added to the tiles of an image: [N, 1, E]. ratio: int64 [1]."""
        return self.gate.tanh() * self.embedding.weight[ratio].view(tiles, 1, -1)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((1,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.5, 0.1)


class Positions(ParamModule):
    """Vectors of patches, the same in each tile, and those by aspect ratio, tile and patch."""

    gate: Tensor
    embedding: Tensor

    def __init__(self, c: TileTowerConfig) -> None:
        super().__init__()
        self.shape = (c.patches, c.hidden)
        self.tile_embedding = Learned(c.ratios, c.tiles * c.patches * c.hidden)
        self.declare("gate", "embedding")

    def forward(self, x: Tensor, ratio: Tensor) -> Tensor:
        """x [N, n, E]. ratio: int64 [1]."""
        gate = self.gate.tanh()
        x = x + (1 - gate) * self.embedding
        return x + gate * self.tile_embedding.weight[ratio].view(x.shape)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((1,) if param == "gate" else self.shape)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.5, 0.1) if param == "gate" else InitSpec(0.0, self.shape[1] ** -0.5)


class TileTower(ParamModule):
    class_embedding: Tensor

    def __init__(self, c: TileTowerConfig) -> None:
        super().__init__()
        self.config = c
        self.patch_embedding = PatchLinear(3, (c.patch, c.patch), c.hidden, bias=False)
        self.pre_tile_positional_embedding = GatedTable(c.ratios, c.tiles * c.hidden)
        self.gated_positional_embedding = Positions(c)
        self.layernorm_pre = LayerNorm(c.hidden, EPS)
        self.transformer = Transformer(c, c.layers, gated=False)
        self.layernorm_post = LayerNorm(c.hidden, EPS)
        self.post_tile_positional_embedding = GatedTable(c.ratios, c.tiles * c.hidden)
        self.global_transformer = Transformer(c, c.global_layers, gated=True)
        self.declare("class_embedding")

    def forward(self, patches: Tensor, tiles: int, ratio: Tensor) -> Tensor:
        """Patches of the tiles of an image -> [tiles * n, (1 + kept states) * E].

        patches: [N * (n - 1), numbers of a patch], zeros behind those of its tiles. ratio: int64
        [1], the number of its aspect ratio.
        """
        c = self.config
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        x = x.view(c.tiles, -1, c.hidden) + self.pre_tile_positional_embedding(ratio, c.tiles)
        x = torch.cat((self.class_embedding.expand(c.tiles, 1, -1), x), dim=1)
        x = self.layernorm_pre(self.gated_positional_embedding(x, ratio).flatten(0, 1))
        lazy_fusion.flush()
        x = pad(x.view(c.tiles, c.patches, -1), (0, 0, 0, c.padded - c.patches))
        count, first = tiles * c.patches, x[:tiles, : c.patches].flatten(0, 1)
        x = torch.cat((first, x[:tiles, c.patches :].flatten(0, 1), x[tiles:].flatten(0, 1)))
        states = self.transformer(x, count)
        kept = [states[i][:count] for i in c.kept]
        x = self.layernorm_post(states[-1])
        lazy_fusion.flush()
        own = self.post_tile_positional_embedding(ratio, c.tiles)
        x = x + torch.cat(
            (
                own[:tiles].expand(-1, c.patches, -1).flatten(0, 1),
                own[:tiles].expand(-1, c.padded - c.patches, -1).flatten(0, 1),
                own[tiles:].expand(-1, c.padded, -1).flatten(0, 1),
            )
        )
        last = [x, *self.global_transformer(x, count)][-1]
        return torch.cat((last[:count], torch.stack(kept, dim=-1).flatten(1)), dim=-1)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.config.hidden,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.config.hidden**-0.5)


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)
    patches_per_row = 1  # of the largest image, which has hardly any padding

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.vision_model = TileTower(TileTowerConfig.from_hf(hf.get("vision_config") or {}))
        self.width = text_hidden(hf)
        states = 1 + len(self.vision_model.config.kept)
        self.multi_modal_projector = Linear(
            self.vision_model.config.hidden * states, self.width, bias=True
        )
        self.weights = Weights(strip=("model.",), fuse=QKV)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        c = self.vision_model.config
        return c.tiles * c.patches

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels uint8 [tiles, H, W, 3], scale_shift float32 [2, 3], ratio int64 [1]."""
        return [self._encode(one) for one in items]

    def _encode(self, item: EncoderInput) -> Tensor:
        c, pixels = self.vision_model.config, item.tensors["pixels"]
        dtype = self.vision_model.class_embedding.dtype
        found = normalized_patches(pixels, item.tensors["scale_shift"], c.patch, dtype)
        missing = (c.tiles - len(pixels)) * (c.patches - 1)
        states = self.vision_model(
            pad(found, (0, 0, 0, missing)), len(pixels), item.tensors["ratio"]
        )
        rows = self.multi_modal_projector(states)
        lazy_fusion.flush()
        return rows
