"""Gemma 4: a tower for images of any size, whose states are averaged over squares; a Conformer.

Rotary angles of an axis turn half of a head. What goes into and comes out of a matrix is clipped in
some checkpoints. Frames of a video are images of their own.

Source: model_type "gemma4", https://huggingface.co/google/gemma-4-E2B-it; transformers
        modeling_gemma4.py
Axes:   P patches of all images, T tokens of a recording, E width of a tower, n rows, W hidden size
        of the text model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    AddRMSNorm,
    EncoderAttention,
    Linear,
    RMSNorm,
    Rope,
    RopeConfig,
    UnitRMSNorm,
    add,
    gated_act,
)
from quire.layers.rope import TokenAngles
from quire.layers.rope_scaling import AxialRope
from quire.models.multimodal._base import EncoderInput, Hf, MediaEncoder, Weights, field_of
from quire.models.multimodal._clipped import ClippedLinear
from quire.models.multimodal._gemma4_audio import AUDIO_PATHS, LocalConformer
from quire.models.multimodal._towers import text_hidden
from quire.models.multimodal._vit import Learned, Packing
from quire.sampling.h2d import to_device

MAX_ROWS = {"image": 1120, "video": 8960}
"""Of an item; quire.media.processors.gemma4 makes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledVitConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    size: int
    mlp: int
    act: str
    eps: float
    theta: float
    patch: int
    pool: int
    places: int  # learned positions of each axis
    clips: bool
    standardizes: bool


def _tower_config(hf: Hf) -> PooledVitConfig:
    rope = field_of(hf, "rope_parameters", dict, default={})
    field_of(rope, "rope_type", str, default="axial", one_of={"axial", "default"})
    field_of(hf, "attention_bias", bool, default=False, one_of={False})
    size = field_of(hf, "head_dim", int, default=64)
    if size % 4:
        raise ConfigError(
            f"config.json: head_dim of the vision tower is {size}; it must be a multiple of 4"
        )
    return PooledVitConfig(
        hidden=field_of(hf, "hidden_size", int, default=768),
        layers=field_of(hf, "num_hidden_layers", int, default=16),
        heads=field_of(hf, "num_attention_heads", int, default=12),
        kv_heads=field_of(hf, "num_key_value_heads", int, default=12),
        size=size,
        mlp=field_of(hf, "intermediate_size", int, default=3072),
        act=field_of(
            hf, "hidden_activation", str, default="gelu_pytorch_tanh", one_of=ACTIVATION_KINDS
        ),
        eps=field_of(hf, "rms_norm_eps", float, default=1e-6),
        theta=field_of(rope, "rope_theta", float, default=100.0),
        patch=field_of(hf, "patch_size", int, default=16),
        pool=field_of(hf, "pooling_kernel_size", int, default=3),
        places=field_of(hf, "position_embedding_size", int, default=10 * 1024),
        clips=field_of(hf, "use_clipped_linears", bool, default=False),
        standardizes=field_of(hf, "standardize", bool, default=False),
    )


class PooledVitAttention(nn.Module):
    def __init__(self, c: PooledVitConfig) -> None:
        super().__init__()
        self.size = c.size
        self.q_proj = ClippedLinear(c.hidden, c.heads * c.size, clips=c.clips)
        self.k_proj = ClippedLinear(c.hidden, c.kv_heads * c.size, clips=c.clips)
        self.v_proj = ClippedLinear(c.hidden, c.kv_heads * c.size, clips=c.clips)
        self.o_proj = ClippedLinear(c.heads * c.size, c.hidden, clips=c.clips)
        self.q_norm, self.k_norm = RMSNorm(c.size, c.eps), RMSNorm(c.size, c.eps)
        self.v_norm = UnitRMSNorm(c.size, c.eps)
        axes = (0,) * (c.size // 4) + (1,) * (c.size // 4)
        self.rope = Rope(RopeConfig(c.theta, c.size, AxialRope(2), axes=axes), c.places)
        self.attn = EncoderAttention(c.size, scale=1.0)

    def forward(self, x: Tensor, angles: TokenAngles, packing: Packing) -> Tensor:
        q = self._paired(self.q_norm(self.q_proj(x).view(len(x), -1, self.size)))
        k = self._paired(self.k_norm(self.k_proj(x).view(len(x), -1, self.size)))
        v = self.v_norm(self.v_proj(x).view(len(x), -1, self.size))
        q, k = self.rope(q, k, angles)
        return self.o_proj(self.attn(q, k, v, packing.starts, packing.longest))

    def _paired(self, heads: Tensor) -> Tensor:
        """The first half of a head turns by the column, the second by the row: put the first halves
        of both before their second halves, as Rope pairs channels."""
        lazy_fusion.flush()
        return heads.unflatten(2, (2, 2, -1)).transpose(2, 3).flatten(2)


class ClippedMLP(nn.Module):
    def __init__(self, c: PooledVitConfig) -> None:
        super().__init__()
        self.gate_proj = ClippedLinear(c.hidden, c.mlp, clips=c.clips)
        self.up_proj = ClippedLinear(c.hidden, c.mlp, clips=c.clips)
        self.down_proj = ClippedLinear(c.mlp, c.hidden, clips=c.clips)
        self.act_kind = ACTIVATION_KINDS[c.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_act(self.gate_proj(x), self.up_proj(x), self.act_kind))


class PooledVitLayer(nn.Module):
    def __init__(self, c: PooledVitConfig) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden, c.eps)
        self.self_attn = PooledVitAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)
        self.pre_feedforward_layernorm = AddRMSNorm(c.hidden, c.eps)
        self.mlp = ClippedMLP(c)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.eps)

    def forward(
        self, x: Tensor, res: Tensor | None, angles: TokenAngles, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        x = self.post_attention_layernorm(self.self_attn(x, angles, packing))
        x, res = self.pre_feedforward_layernorm(x, res)
        return self.post_feedforward_layernorm(self.mlp(x)), res


class PooledVit(nn.Module):
    def __init__(self, hf: Hf) -> None:
        super().__init__()
        c = self.config = _tower_config(hf)
        self.input_proj = Linear(3 * c.patch**2, c.hidden)
        self.positions = Learned(2, c.places, c.hidden)
        self.layers = nn.ModuleList(PooledVitLayer(c) for _ in range(c.layers))
        self.std_bias = Learned(c.hidden) if c.standardizes else None
        self.std_scale = Learned(c.hidden) if c.standardizes else None

    def forward(self, frames: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """(pixels uint8 [N, H, W, 3], scale and shift [2, 3]) of each item -> [n, E]."""
        c, table = self.config, self.positions.weight
        patches = torch.cat([_patches(*one, c.patch, table.dtype) for one in frames])
        grids = [
            (one.shape[1] // c.patch, one.shape[2] // c.patch) for one, _ in frames for _ in one
        ]
        places = to_device(_places(grids), patches.device)
        x = self.input_proj(patches)
        lazy_fusion.flush()
        x = x + (table[0][places[0].long()] + table[1][places[1].long()])
        packing = Packing.of([rows * columns for rows, columns in grids], x.device)
        first: Any = self.layers[0]
        angles, res = first.self_attn.rope.gather(places), None
        for layer in self.layers:
            x, res = layer(x, res, angles, packing)
        return self._pooled(x if res is None else add(x, res), grids)

    def _pooled(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Means of squares of patches, row by row of each image."""
        lazy_fusion.flush()
        k, sizes = self.config.pool, [rows * columns for rows, columns in grids]
        pooled = [
            part.view(rows // k, k, columns // k, k, -1).float().mean((1, 3)).flatten(0, 1)
            for part, (rows, columns) in zip(x.split(sizes), grids, strict=True)
        ]
        found = torch.cat(pooled).to(x.dtype).float() * self.config.hidden**0.5
        if self.std_bias is not None and self.std_scale is not None:
            found = (found - self.std_bias.weight.float()) * self.std_scale.weight.float()
        return found.to(x.dtype)


def _patches(pixels: Tensor, scale_shift: Tensor, patch: int, dtype: torch.dtype) -> Tensor:
    """Normalized patches [P, patch * patch * 3], channels last."""
    count, height, width, channels = pixels.shape
    cut = pixels.view(count, height // patch, patch, width // patch, patch, channels)
    scale, shift = scale_shift
    flat = cut.transpose(2, 3) * scale + shift
    return flat.to(dtype).reshape(-1, patch * patch * channels)


def _places(grids: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """(column, row) of each patch: int32 [2, P]."""
    found = [np.indices(grid, np.int32)[::-1].reshape(2, -1) for grid in grids]
    return np.concatenate(found, axis=1)


class UnitNormProjector(nn.Module):
    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.norm, self.linear = UnitRMSNorm(inputs, eps), Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Encoder(MediaEncoder):
    """An item has the tensors pixels [N, H, W, 3] and scale_shift [2, 3], or features [F, bins]."""

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        self.width = text_hidden(hf)
        vision, audio = hf.get("vision_config"), hf.get("audio_config")
        found: list[str] = []
        if vision is not None:
            self.images = PooledVit(vision)
            c = self.images.config
            self.image_rows = UnitNormProjector(c.hidden, self.width, c.eps)
            self.patches_per_row = c.pool**2
            found += ("image", "video")
        if audio is not None:
            self.audio = LocalConformer(audio)
            self.audio_rows = UnitNormProjector(
                self.audio.outputs, self.width, self.audio.config.eps
            )
            found.append("audio")
        self.modalities = tuple(found)
        self.bidirectional = hf["text_config"].get("use_bidirectional_attention") == "vision"
        self.weights = Weights(
            strip=("model.",),
            paths={
                "vision_tower.patch_embedder": "images",
                "vision_tower.encoder": "images",
                "vision_tower": "images",
                "embed_vision.embedding_projection": "image_rows.linear",
                "audio_tower": "audio",
                "embed_audio.embedding_projection": "audio_rows.linear",
                **AUDIO_PATHS,
            },
            alias={
                f"{outer}vision_tower.{name}": f"images.{to}"
                for outer in ("", "model.")
                for name, to in (
                    ("patch_embedder.position_embedding_table", "positions.weight"),
                    ("std_bias", "std_bias.weight"),
                    ("std_scale", "std_scale.weight"),
                )
            },
        )

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        if modality == "audio":
            return self.audio.max_rows
        return MAX_ROWS[modality]

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        seen = [i for i, one in enumerate(items) if one.modality != "audio"]
        if seen:
            frames = [(items[i].tensors["pixels"], items[i].tensors["scale_shift"]) for i in seen]
            rows = self.image_rows(self.images(frames))
            lazy_fusion.flush()
            cell = (self.images.config.patch * self.images.config.pool) ** 2
            counts = [one.shape[:3].numel() // cell for one, _ in frames]
            found |= dict(zip(seen, rows.split(counts), strict=True))
        for i, one in enumerate(items):
            if i not in found:
                found[i] = self.audio_rows(self.audio(one.tensors["features"]))
                lazy_fusion.flush()
        return [found[i] for i in range(len(items))]
