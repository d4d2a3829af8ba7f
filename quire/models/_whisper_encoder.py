"""Whisper's encoder: two convolutions over log-mel features, and layers with norms before parts.

It is the encoder of Whisper, and the tower of models that read audio.

Source: transformers modeling_whisper.py
Axes:   M mel bins, P positions of a recording (half of its frames), T positions of all, E hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    ColumnLinear,
    Conv1d,
    PositionEmbedding,
    RowLinear,
    add,
)
from quire.models._encoder_decoder import BidirectionalAttention, PackedSources
from quire.models.base import CarriedStates, Hf, field_of

EPS = 1e-5  # not in config.json
KERNEL = 3
ZERO_BIAS = ("k_proj",)
"""Keys have no bias in checkpoints; it would add the same to all scores of a query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """The fields of config.json that describe the encoder."""

    mel_bins: int
    positions: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    act: str

    @classmethod
    def from_hf(cls, hf: Hf) -> EncoderSizes:
        """Raises ConfigError."""
        hidden, heads = (field_of(hf, name, int) for name in ("d_model", "encoder_attention_heads"))
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"config.json: encoder_attention_heads is {heads}; it must divide d_model, {hidden}"
            )
        act = field_of(hf, "activation_function", str, default="gelu", one_of=ACTIVATION_KINDS)
        return cls(
            mel_bins=field_of(hf, "num_mel_bins", int),
            positions=field_of(hf, "max_source_positions", int),
            hidden=hidden,
            layers=field_of(hf, "encoder_layers", int),
            heads=heads,
            mlp=field_of(hf, "encoder_ffn_dim", int),
            act=act,
        )


class WhisperEncoderLayer(nn.Module):
    def __init__(self, c: EncoderSizes) -> None:
        super().__init__()
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, EPS)
        self.self_attn = BidirectionalAttention(c.hidden, c.heads)
        self.final_layer_norm = AddLayerNorm(c.hidden, EPS)
        self.fc1 = ColumnLinear(c.hidden, c.mlp, bias=True)
        self.act = Activation(c.act)
        self.fc2 = RowLinear(c.mlp, c.hidden, bias=True)

    def forward(self, x: Tensor, res: Tensor | None, packed: PackedSources) -> CarriedStates:
        x, res = self.self_attn_layer_norm(x, res)
        x = self.self_attn(x, packed)
        x, res = self.final_layer_norm(x, res)
        return self.fc2(self.act(self.fc1(x))), res


class WhisperEncoder(nn.Module):
    """embed() and then run(), which other models' towers call with pooling between or after."""

    def __init__(self, c: EncoderSizes) -> None:
        super().__init__()
        self.conv1 = Conv1d(c.mel_bins, c.hidden, KERNEL)
        self.conv2 = Conv1d(c.hidden, c.hidden, KERNEL, stride=2)
        self.act = Activation("gelu")
        self.embed_positions = PositionEmbedding(c.positions, c.hidden)
        self.layers = nn.ModuleList(WhisperEncoderLayer(c) for _ in range(c.layers))
        self.norm = AddLayerNorm(c.hidden, EPS)

    def embed(self, features: Sequence[Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Features [M, 2 P] of each recording -> [T, E]. lengths: positions that are kept."""
        dtype = self.conv1.weight.dtype
        rows = []
        for i, one in enumerate(features):
            x = self.act(self.conv2(self.act(self.conv1(one.to(dtype)))))
            lazy_fusion.flush()
            x = x.t()[: None if lengths is None else lengths[i]].contiguous()
            positions = torch.arange(len(x), dtype=torch.int32, device=x.device)
            rows.append(add(x, self.embed_positions(positions)))
        lazy_fusion.flush()
        return torch.cat(rows)

    def run(self, x: Tensor, packed: PackedSources) -> Tensor:
        """[T, E] -> [T, E]: the layers, without the last norm."""
        res = None
        for layer in self.layers:
            x, res = layer(x, res, packed)
        return x if res is None else add(x, res)
