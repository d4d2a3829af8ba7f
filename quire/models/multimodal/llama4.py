"""Llama 4: a ViT with rotary rows and columns, whose states are joined in squares of 2 x 2.

Source: model_type "llama4", https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E-Instruct;
        transformers modeling_llama4.py
Axes:   N tiles, P patches of one, T = N * (P + 1) tokens: of each tile a class token is the last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, AddLayerNorm, LayerNorm, Linear, Rope, RopeConfig
from quire.layers.rope_scaling import AxialRope
from quire.models._decoder import PlainMLP
from quire.models.multimodal._base import (
    EncoderInput,
    Hf,
    MediaEncoder,
    Weights,
    field_of,
    normalized_patches,
)
from quire.models.multimodal._qwen_vision import (
    TowerAttention,
    TowerBlock,
    TowerConfig,
    segments_of,
    sum_of,
)
from quire.models.multimodal._towers import merge_neighbours, text_hidden
from quire.models.multimodal._vit import Learned
from quire.sampling.h2d import to_device

EPS = 1e-5
"""Of all norms of the tower."""
MAX_TILES = 17
"""Of an image: tiles, and the whole of it."""
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "image_size": 448,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
"""What a vision section leaves out."""


class PairAttention(TowerAttention):
    """Rotary pairs are neighbours: columns turn the first half of them, rows the other."""

    def __init__(self, c: TowerConfig, side: int) -> None:
        super().__init__(c)
        head_dim = c.hidden // c.heads
        axes = (1,) * (head_dim // 4) + (0,) * (head_dim // 4)
        config = RopeConfig(c.theta, head_dim, AxialRope(2), axes=axes)
        self.rope = Rope(config, side + 1, interleaved=True)


class JoinedStatesMLP(nn.Module):
    """act(fc2(act(fc1(x)))) of the joined states of four patches."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.width = outputs
        self.fc1, self.fc2 = Linear(inputs, hidden), Linear(hidden, outputs)
        self.act = Activation("gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc2(self.act(self.fc1(x))))


class Encoder(MediaEncoder):
    modalities: tuple[str, ...] = ("image",)
    weights = Weights(
        strip=("model.",),
        paths={
            "vision_model.patch_embedding.linear": "patch_embedding",
            "vision_model.vision_adapter.mlp": "adapter",
            "vision_model.model.layers": "blocks",
            "vision_model": "",
            "multi_modal_projector.linear_1": "projector",
            "self_attn.o_proj": "attn.proj",
            "self_attn": "attn",
            "input_layernorm": "norm1",
            "post_attention_layernorm": "norm2",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
        },
        alias={
            f"{outer}vision_model.{theirs}": f"{ours}.weight"
            for outer in ("", "model.")
            for theirs, ours in {
                "class_embedding": "class_token",
                "positional_embedding_vlm": "positions",
            }.items()
        },
        fuse={"qkv": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.rotary_embedding.*",),
    )

    def __init__(self, c: TowerConfig, side: int, adapter: JoinedStatesMLP, outputs: int) -> None:
        """side: patches along the side of a tile."""
        super().__init__()
        self.config, self.side, self.width = c, side, outputs
        self.patch_embedding = Linear(c.channels * c.patch**2, c.hidden)
        self.class_token = Learned(c.hidden)
        self.positions = Learned(side**2 + 1, c.hidden)
        self.layernorm_pre = LayerNorm(c.hidden, EPS)
        self.blocks = nn.ModuleList(_block(c, side) for _ in range(c.layers))
        self.layernorm_post = LayerNorm(c.hidden, EPS)
        self.adapter = adapter
        self.projector = Linear(adapter.width, outputs)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        stated = (hf.get("vision_config") or {}).items()
        vision = {**DEFAULTS, **{key: value for key, value in stated if value is not None}}
        hidden, heads = (
            field_of(vision, key, int) for key in ("hidden_size", "num_attention_heads")
        )
        width = field_of(vision, "intermediate_size", int)
        field_of(vision, "pixel_shuffle_ratio", float, default=0.5, one_of={0.5})
        side = field_of(vision, "image_size", int) // field_of(vision, "patch_size", int)
        if heads < 1 or hidden % (4 * heads) or width != 4 * hidden or side % 2:
            raise ConfigError(
                f"config.json: the vision tower has {heads} heads of {hidden} numbers, an "
                f"intermediate_size of {width}, and {side} patches along a side; heads must be "
                "multiples of 4, the second 4 times the first, and patches even"
            )
        rope = field_of(vision, "rope_parameters", dict, default={})
        theta = field_of(vision, "rope_theta", float, default=10000.0)
        config = TowerConfig(
            hidden=hidden,
            layers=field_of(vision, "num_hidden_layers", int),
            heads=heads,
            mlp=width,
            act="gelu",
            outputs=text_hidden(hf),
            patch=field_of(vision, "patch_size", int),
            depth=1,
            merge=2,
            channels=field_of(vision, "num_channels", int, default=3),
            theta=field_of(rope, "rope_theta", float, default=theta),
            eps=EPS,
        )
        inner = field_of(vision, "projector_input_dim", int)
        adapter = JoinedStatesMLP(width, inner, field_of(vision, "projector_output_dim", int))
        return cls(config, side, adapter, text_hidden(hf))

    def max_rows(self, modality: str) -> int:
        return MAX_TILES * self.side**2 // 4

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        """pixels uint8 [N, H, W, C], scale_shift float32 [2, C]."""
        lazy_fusion.flush()
        counts = [len(one.tensors["pixels"]) for one in items]
        x = self.patch_embedding(torch.cat([self._patches(one) for one in items]))
        lazy_fusion.flush()
        tiles, tokens = sum(counts), self.side**2 + 1
        x = x.view(tiles, tokens - 1, -1)
        x = torch.cat((x, self.class_token.weight.expand(tiles, 1, -1)), dim=1)
        x, res = self.layernorm_pre((x + self.positions.weight).flatten(0, 1)), None
        rope: Rope = self.blocks[0].attn.rope  # type: ignore[union-attr, assignment]
        angles = rope.gather(self._places(tiles, x.device))
        segments = segments_of([tokens] * tiles, x.device)
        for block in self.blocks:
            x, res = block(x, res, angles, segments)
        x = self.layernorm_post(sum_of(x, res))
        lazy_fusion.flush()
        cells = merge_neighbours(x.view(tiles, tokens, -1)[:, :-1].contiguous(), 2)
        rows = self.projector(self.adapter(cells.flatten(0, 1)))
        lazy_fusion.flush()
        return list(rows.split([count * self.side**2 // 4 for count in counts]))

    def _patches(self, item: EncoderInput) -> Tensor:
        """Normalized patches [N * P, C * patch * patch], rounded to bfloat16 as theirs are."""
        pixels, scale_shift = item.tensors["pixels"], item.tensors["scale_shift"]
        dtype, patch = self.positions.weight.dtype, self.config.patch
        return normalized_patches(pixels, scale_shift, patch, dtype, inside=torch.bfloat16)

    def _places(self, tiles: int, device: torch.device) -> Tensor:
        """(row, column) of all tokens, from 1; 0 of class tokens: [2, T]."""
        cells = np.indices((self.side, self.side), np.int32).reshape(2, -1) + 1
        own = np.concatenate((cells, np.zeros((2, 1), np.int32)), axis=1)
        return to_device(np.tile(own, tiles), device)


def _block(c: TowerConfig, side: int) -> TowerBlock:
    made = TowerBlock(c, PlainMLP(c.hidden, c.mlp, c.act), AddLayerNorm)
    made.attn = PairAttention(c, side)
    return made
