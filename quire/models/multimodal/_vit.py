"""Vision transformers with learned positions: of CLIP, SigLIP and InternViT. Images are packed.

    x = patches W + positions            with a class token in front of each image, or without
    x = x + scale_1 * attn(norm_1(x))    attention sees the tokens of one image
    x = x + scale_2 * mlp(norm_2(x))

Axes: N images, P patches of all, T tokens of all, n tokens of one, E hidden, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    AddRMSNorm,
    EncoderAttention,
    LayerNorm,
    Linear,
    ParamModule,
    PatchLinear,
    QKVLinear,
    RMSNorm,
    add,
)
from quire.models.base import Hf, field_of, run_to_end
from quire.sampling.h2d import move_tensor, to_device
from quire.weights.mapping import InitSpec, WeightShard


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """Sizes of a tower, and what towers differ in."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    act: str
    eps: float
    image: tuple[int, int]  # height and width in pixels that the positions are for
    patch: int
    channels: int = 3
    class_token: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    first_norm: bool = False  # embeddings are normed
    rms_norms: bool = False
    qk_norms: bool = False  # of all heads at once
    scales: bool = False  # a factor of each number that a layer adds
    fractions: bool = False  # a patch has the position of its place in the image, as a fraction

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        return self.image[0] // self.patch, self.image[1] // self.patch


def vit_sizes(hf: Hf, **defaults: Any) -> dict[str, Any]:
    """Fields of VitConfig of a vision section. defaults: of fields that the section leaves out."""
    hf = {**defaults, **{key: value for key, value in hf.items() if value is not None}}
    hidden, heads = field_of(hf, "hidden_size", int), field_of(hf, "num_attention_heads", int)
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads of the vision tower is {heads}; it must divide "
            f"hidden_size, {hidden}"
        )
    image, patch = hf.get("image_size"), hf.get("patch_size")
    image = (image, image) if isinstance(image, int) else tuple(image or ())
    patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
    if not _are_sizes(image, patch):
        raise ConfigError(
            f"config.json: image_size of the vision tower is {hf.get('image_size')!r:.40} and "
            f"patch_size {hf.get('patch_size')!r:.40}; both must be positive, the image larger"
        )
    return {
        "hidden": hidden,
        "layers": field_of(hf, "num_hidden_layers", int),
        "heads": heads,
        "mlp": field_of(hf, "intermediate_size", int),
        "act": field_of(hf, "hidden_act", str, one_of=ACTIVATION_KINDS),
        "eps": field_of(hf, "layer_norm_eps", float),
        "image": image,
        "patch": patch,
        "channels": field_of(hf, "num_channels", int, default=3),
    }


def _are_sizes(image: tuple[Any, ...], patch: object) -> bool:
    if not isinstance(patch, int) or len(image) != 2:
        return False
    return all(isinstance(side, int) and side >= patch > 0 for side in image)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the tokens of each image are in a packed sequence."""

    starts: Tensor  # [N + 1] int32
    longest: int
    key_counts: Tensor | None = None  # [N] int32: tokens that are attended to, the first; None: all

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """lengths: tokens of each image."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(starts.to(device, non_blocking=True), max(lengths))


class Learned(ParamModule):
    """A learned vector or table, `weight`. A checkpoint may have it with axes of one in front."""

    weight: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.declare("weight")

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        ranges = tuple(range(size) for size in self.shape)
        return (WeightShard(self.shape, ranges, broadcastable=True),)

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, self.shape[-1] ** -0.5)


class LayerScale(Learned):
    """A learned factor of each column: x [T, E] -> [T, E]."""

    def forward(self, x: Tensor) -> Tensor:
        lazy_fusion.flush()
        return x * self.weight

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)


def fractional_positions(rows: int, columns: int, side: int) -> Tensor:
    """Positions of the patches of an image in a table of side x side: [rows * columns] int64.

    In float32 and on the CPU as transformers computes them: patches at a border depend on it.
    """
    with torch.device("cpu"):
        borders = torch.arange(1 / side, 1.0, 1 / side)

        def buckets(count: int) -> Tensor:
            step = 1.0 / torch.tensor([count])
            places = torch.arange(count, dtype=torch.float32)[None] * step[:, None]
            return torch.bucketize(places.clamp(max=1.0 - 1e-6), borders, right=True)[0]

        return (buckets(rows)[:, None] * side + buckets(columns)[None]).flatten()


class VitEmbeddings(nn.Module):
    """Patches of whole images [P, C * patch * patch] -> [T, E]."""

    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.places = None
        if c.fractions:
            self.places = fractional_positions(*c.grid, c.grid[0])
        self.patches = c.grid[0] * c.grid[1]
        kernel = (c.patch, c.patch)
        self.patch_embedding = PatchLinear(c.channels, kernel, c.hidden, c.patch_bias)
        self.class_token = Learned(c.hidden) if c.class_token else None
        self.position_embedding = Learned(self.patches + c.class_token, c.hidden)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        x = x.view(-1, self.patches, x.shape[-1])
        if self.class_token is not None:
            first = self.class_token.weight.expand(len(x), 1, -1)
            x = torch.cat((first, x), dim=1)
        table: Tensor = self.position_embedding.weight
        if self.places is not None:
            self.places = move_tensor(self.places, x.device)  # once
            table = table[self.places]
        return (x + table).flatten(0, 1)


class VitAttention(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        size = c.hidden // c.heads
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.heads, size, c.qkv_bias)
        self.q_norm = RMSNorm(c.hidden, c.eps) if c.qk_norms else None
        self.k_norm = RMSNorm(c.hidden, c.eps) if c.qk_norms else None
        self.attn = EncoderAttention(size)
        self.out_proj = Linear(c.hidden, c.hidden, bias=True)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.flatten(1)).view(q.shape)
            k = self.k_norm(k.flatten(1)).view(k.shape)
        where = packing.starts, packing.longest, packing.key_counts
        return self.out_proj(self.attn(q, k, v, *where))


class VitMLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, hidden: int, mlp: int, act: str) -> None:
        super().__init__()
        self.fc1 = Linear(hidden, mlp, bias=True)
        self.act = Activation(act)
        self.fc2 = Linear(mlp, hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # [T, E] -> [T, F] -> [T, E]


class VitLayer(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        norm = AddRMSNorm if c.rms_norms else AddLayerNorm
        self.layer_norm1 = norm(c.hidden, c.eps)
        self.self_attn = VitAttention(c)
        self.scale1 = LayerScale(c.hidden) if c.scales else None
        self.layer_norm2 = norm(c.hidden, c.eps)
        self.mlp = VitMLP(c.hidden, c.mlp, c.act)
        self.scale2 = LayerScale(c.hidden) if c.scales else None

    def forward(self, x: Tensor, res: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """x [T, E] is what the layer before adds to the residual; so is the first result."""
        x, res = self.layer_norm1(x, res)
        x = self.self_attn(x, packing)
        x, res = self.layer_norm2(x if self.scale1 is None else self.scale1(x), res)
        x = self.mlp(x)
        return (x if self.scale2 is None else self.scale2(x)), res


class Vit(nn.Module):
    """Layers up to the last one whose states are asked for.

    wanted: hidden states that are the result, by number as transformers counts them: 0 is the
    embeddings, i follows layer i, negative numbers count from the last. last_norm: the tower has a
    norm of the states after its last layer, and these are the result.
    """

    def __init__(
        self, c: VitConfig, wanted: Sequence[int] = (-1,), *, last_norm: bool = False
    ) -> None:
        super().__init__()
        self.wanted = tuple(i if i >= 0 else c.layers + 1 + i for i in wanted)
        if not all(0 <= i <= c.layers for i in self.wanted):
            raise ConfigError(
                f"config.json: the vision tower has {c.layers} layers; states {list(wanted)} do "
                "not exist"
            )
        self.config = c
        self.embeddings = VitEmbeddings(c)
        self.pre_layrnorm = LayerNorm(c.hidden, c.eps) if c.first_norm else None
        self.layers = nn.ModuleList(VitLayer(c) for _ in range(max(self.wanted)))
        self.post_layernorm = LayerNorm(c.hidden, c.eps) if last_norm else None

    @property
    def tokens(self) -> int:
        """Tokens of an image, a class token included."""
        return len(self.embeddings.position_embedding.weight)

    def unused(self) -> tuple[str, ...]:
        """Prefixes of the layers that a checkpoint has and this tower leaves out."""
        missing = range(len(self.layers), self.config.layers)
        return tuple(f"layers.{i}." for i in missing)

    def starts(self, images: int) -> npt.NDArray[np.int32]:
        """Where each image's tokens begin, and the end: int32 [N + 1]."""
        return np.arange(images + 1, dtype=np.int32) * np.int32(self.tokens)

    def forward(self, patches: Tensor, starts: Tensor | None = None) -> list[Tensor]:
        """Patches [P, C * patch * patch] of whole images -> wanted states, each [N, n, E].

        starts: of the images, if the device has them.
        """
        return run_to_end(self.in_slices(patches, starts))

    def in_slices(
        self, patches: Tensor, starts: Tensor | None = None
    ) -> Generator[None, None, list[Tensor]]:
        """The same; it stops behind each layer."""
        x = self.embeddings(patches)
        if starts is None:
            starts = to_device(self.starts(len(x) // self.tokens), x.device)
        packing = Packing(starts, self.tokens)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        found, res = {0: x}, None
        for i, layer in enumerate(self.layers, 1):
            x, res = layer(x, res, packing)
            if i in self.wanted:
                found[i] = add(x, res)
            yield
        if self.post_layernorm is not None:
            found[len(self.layers)] = self.post_layernorm(found[len(self.layers)])
        lazy_fusion.flush()
        return [found[i].view(-1, self.tokens, x.shape[-1]) for i in self.wanted]
