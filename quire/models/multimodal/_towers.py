"""Towers of CLIP and SigLIP inside wrappers, the names in their checkpoints, and image encoders.

A wrapper's file gives the projector and how an item's rows follow from those of its images.

Axes: N images or tiles, n rows of one, H and W pixels, E hidden size of the text model
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ACTIVATION_KINDS, Activation, Linear
from quire.models.multimodal._base import (
    GRAPH_TOKENS,
    EncoderInput,
    Hf,
    MediaEncoder,
    Weights,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._vit import Vit, VitConfig, vit_sizes

CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""What a vision section of CLIP leaves out."""
SIGLIP = CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
TOWER_NAMES = {
    "vision_tower.vision_model": "tower",
    "vision_tower": "tower",
    "vision_model": "tower",
    "encoder.layers": "layers",
    "self_attn.qkv": "self_attn.qkv_proj",
    "self_attn.projection": "self_attn.out_proj",
    "multi_modal_projector": "projector",
}
"""Paths in checkpoints -> ours."""
VECTORS = {"embeddings.class_embedding": "embeddings.class_token.weight"}
"""Parameters of the embeddings -> ours."""
BLIP_ALIASES = {
    "vision_model.embeddings.position_embedding": "tower.embeddings.position_embedding.weight"
}
"""Whole names in checkpoints -> ours, of towers of BLIP."""
QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
UNUSED = ("*.position_ids", "*.post_layernorm.*", "*vision*.head.*")
"""Tensors of towers that no wrapper of these families reads: buffers, and heads for other tasks."""


def build_clip(
    hf: Hf, wanted: Sequence[int], defaults: Mapping[str, Any] = {}, *, last_norm: bool = False
) -> Vit:
    """Build the tower of a vision section. defaults: of the wrapper, before those of CLIP.

    last_norm: the states are normed.
    """
    sizes = vit_sizes(hf, **{**CLIP, **defaults})
    config = VitConfig(**sizes, class_token=True, patch_bias=False, first_norm=True)
    return Vit(config, wanted, last_norm=last_norm)


def build_siglip(
    hf: Hf, wanted: Sequence[int] = (-1,), *, last_norm: bool = True, fractions: bool = False
) -> Vit:
    """Build the tower of a vision section. last_norm: the states are normed.

    fractions: see VitConfig.
    """
    config = VitConfig(**vit_sizes(hf, **SIGLIP), fractions=fractions)
    return Vit(config, wanted, last_norm=last_norm)


def build_blip(hf: Hf) -> Vit:
    """Build the tower of a vision section of BLIP, whose states are normed."""
    qkv_bias = field_of(hf, "qkv_bias", bool, default=True)
    config = VitConfig(**vit_sizes(hf), class_token=True, qkv_bias=qkv_bias)
    return Vit(config, (-1,), last_norm=True)


def build_tower(hf: Hf, wanted: Sequence[int], defaults: Mapping[str, Any] = {}) -> Vit:
    """Build a tower of any of these kinds, by its model_type, without a norm of the states."""
    kind = field_of(hf, "model_type", str, default="clip_vision_model")
    if kind == "clip_vision_model":
        return build_clip(hf, wanted, defaults)
    if kind == "siglip_vision_model":
        return build_siglip(hf, wanted, last_norm=False)
    raise ConfigError(
        f"config.json: the vision tower is of type {kind!r:.80}; supported: clip_vision_model, "
        "siglip_vision_model"
    )


def tower_weights(
    tower: Vit,
    *,
    paths: Mapping[str, str] = {},
    alias: Mapping[str, str] = {},
    used: Sequence[str] = (),
) -> Weights:
    """Return the names in the checkpoint of a wrapper with `tower` and `projector`.

    paths, alias: of the wrapper, in addition; names in `alias` are without "model.". used: those of
    UNUSED that the wrapper reads.
    """
    prefixes = ("vision_tower.vision_model.", "vision_tower.", "vision_model.")
    vectors = {
        f"{outer}{prefix}{theirs}": f"tower.{ours}"
        for outer in ("", "model.")
        for prefix in prefixes
        for theirs, ours in VECTORS.items()
    }
    absent = tuple(f"tower.{name}" for name in tower.unused())
    if tower.post_layernorm is not None:
        used = (*used, "*.post_layernorm.*")
    return Weights(
        strip=("model.",),
        paths=dict(paths) | TOWER_NAMES,
        alias=vectors
        | {f"{outer}{one}": to for outer in ("", "model.") for one, to in alias.items()},
        fuse=QKV,
        ignore=tuple(one for one in UNUSED if one not in used),
        absent=absent,
    )


class MLPProjector(nn.Module):
    """linear_2(act(linear_1(x)))."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, act: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.linear_1 = Linear(inputs, hidden, bias)
        self.act = Activation(act)
        self.linear_2 = Linear(hidden, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


class ImageEncoder(MediaEncoder):
    """Encodes items that are images of one size, or tiles of it.

    An item has the tensors
        pixels       uint8 [N, H, W, C]
        scale_shift  float32 [2, C], of normalization
    and others of the family. Subclasses set `tower` and project its states.
    """

    modalities: tuple[str, ...] = ("image",)
    has_graphs: ClassVar[bool] = False
    """Whether project() copies nothing from the host, so that a graph can have it."""
    tower: Vit

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        counts = [len(one.tensors["pixels"]) for one in items]
        rows = self._run(self._patches(items), sum(counts))
        return [self.arrange(one, own) for one, own in zip(items, torch.split(rows, counts))]

    @property
    def slices(self) -> int:
        """Layers of the tower, if nothing else of encode() is the family's."""
        is_plain = type(self).encode is ImageEncoder.encode and isinstance(self.tower, Vit)
        return len(self.tower.layers) if is_plain else 1

    def encode_in_slices(
        self, items: Sequence[EncoderInput]
    ) -> Generator[None, None, list[Tensor]]:
        if self.slices == 1:
            return self.encode(items)
        counts = [len(one.tensors["pixels"]) for one in items]
        states = yield from self.tower.in_slices(self._patches(items))
        rows = self.project(states)
        lazy_fusion.flush()
        return [self.arrange(one, own) for one, own in zip(items, torch.split(rows, counts))]

    def states(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """Return the states of all images of items, each [N, n, hidden of the tower]."""
        return self.tower(self._patches(items))

    def _patches(self, items: Sequence[EncoderInput]) -> Tensor:
        dtype = self.tower.embeddings.position_embedding.weight.dtype
        patch = self.tower.config.patch
        cut = [
            normalized_patches(one.tensors["pixels"], one.tensors["scale_shift"], patch, dtype)
            for one in items
        ]
        return cut[0] if len(cut) == 1 else torch.cat(cut)

    def graph_sizes(self) -> Sequence[int]:
        if not self.has_graphs:
            return ()
        one = self.tower.embeddings.patches
        return [images * one for images in range(1, GRAPH_TOKENS[-1] // one + 1)]

    def graph_inputs(self, size: int) -> tuple[int, Mapping[str, np.ndarray]]:
        starts = self.tower.starts(size // self.tower.embeddings.patches)
        return self.tower.embeddings.patch_embedding.inputs, {"starts": starts}

    def graph_forward(self, size: int, patches: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        return self.project(self.tower(patches, arrays["starts"])).flatten(0, 1)

    def _run(self, patches: Tensor, images: int) -> Tensor:
        """Rows [N, n, E] of the patches of N images."""
        size = None if self.graphs is None else self.graphs.size_for(len(patches))
        if self.graphs is not None and size is not None:
            all_rows = self.graphs.run(size, patches, self.graph_inputs(size)[1])
            padded = size // self.tower.embeddings.patches
            return all_rows.view(padded, -1, all_rows.shape[1])[:images]
        rows = self.project(self.tower(patches))
        lazy_fusion.flush()
        return rows

    @abstractmethod
    def project(self, states: list[Tensor]) -> Tensor:
        """States of the tower, each [N, n, hidden of the tower] -> [N, n, E]."""

    def arrange(self, item: EncoderInput, rows: Tensor) -> Tensor:
        """Rows of the images of an item [N, n, E] -> rows of the item."""
        return rows.flatten(0, 1)


class TileEncoder(ImageEncoder):
    """Encodes tiles of which factor x factor neighbouring patches make a row.

    Subclasses set `skipped` (leading tokens of the tower), `factor` and `projector`.
    """

    has_graphs = True
    max_tiles: ClassVar[int] = 13
    """Of an image: the tiles, and the thumbnail."""
    skipped: int
    factor: int
    projector: nn.Module

    def max_rows(self, modality: str) -> int:
        return (self.tower.tokens - self.skipped) // self.factor**2 * self.max_tiles

    def project(self, states: list[Tensor]) -> Tensor:
        x = merge_neighbours(chosen_states(states, self.skipped), self.factor)
        rows: Tensor = self.projector(x.flatten(0, 1))
        return rows.view(*x.shape[:2], -1)


def merge_neighbours(x: Tensor, factor: int) -> Tensor:
    """Join the states of squares of a square grid: [N, n, C] -> [N, n / factor², factor² * C]."""
    side = math.isqrt(x.shape[1])
    lazy_fusion.flush()
    cells = x.view(len(x), side // factor, factor, side // factor, factor, -1)
    return cells.transpose(2, 3).reshape(len(x), (side // factor) ** 2, -1)


def chosen_states(states: Sequence[Tensor], skipped: int) -> Tensor:
    """Join states [N, n, C] of several layers, without the first `skipped` tokens of an image."""
    if len(states) == 1 and not skipped:
        return states[0]
    return torch.cat([one[:, skipped:] for one in states], dim=-1)


def feature_layers(hf: Hf, default: int) -> list[int]:
    """Read vision_feature_layer: one hidden state of the tower or several."""
    found = hf.get("vision_feature_layer")
    layers = found if isinstance(found, list) else [default if found is None else found]
    if not layers or not all(isinstance(one, int) for one in layers):
        raise ConfigError(f"config.json: vision_feature_layer is {found!r:.80}; it must be layers")
    return layers


def skipped_tokens(hf: Hf, default: str) -> int:
    """Read vision_feature_select_strategy: tokens left out at the start of each image."""
    name = "vision_feature_select_strategy"
    found = field_of(hf, name, str, default=default, one_of={"default", "full"})
    return 1 if found == "default" else 0


def text_hidden(hf: Hf) -> int:
    """Hidden size of the text model."""
    return field_of(hf["text_config"], "hidden_size", int)


def activation_of(hf: Hf, field: str, default: str = "gelu") -> str:
    """Read the name of an activation. Raises ConfigError."""
    return field_of(hf, field, str, default=default, one_of=ACTIVATION_KINDS)
