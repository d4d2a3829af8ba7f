"""Recordings of Phi-4-multimodal: a Conformer over log-mel features, a position for each 80 ms.

    x = x + mlp_in(x) / 2;  x = x + attn(norm(x));  x = x + conv(x);  x = norm(x + mlp_out(x) / 2)

Positions attend to all of their piece: recordings are cut into pieces of 500 positions, the last
filled up with zeros. Kernels of a convolution over time see what is before, of the piece.

Source: transformers modeling_phi4_multimodal.py
Axes:   F frames of a recording, B mel bins, T positions of all, E hidden, C channels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.framework import lazy_fusion
from quire.layers import EncoderAttention, LayerNorm, Linear, QKVLinear
from quire.layers.relative_bias import RelativeBias
from quire.models.multimodal._base import EncoderInput, Hf, field_of
from quire.models.multimodal._towers import MLPProjector
from quire.models.multimodal._vit import Learned, Packing
from quire.sampling.h2d import to_device

PIECE = 500
"""Positions that attend to each other."""
EPS = 1e-5
MAX_SECONDS, FRAMES_PER_SECOND = 600, 100
"""Of a recording; quire.media.processors.phi4_multimodal makes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerConfig:
    """Sizes of the encoder."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    channels: int  # of the convolutions before the layers
    wide: int  # channels of the convolutions in layers
    kernel: int  # steps that these see
    bins: int
    reduction: int  # frames of a position
    distance: int  # from which on keys have one bias
    symmetric: bool


def conformer_config(hf: Hf) -> ConformerConfig:
    """Read audio_config. Raises ConfigError."""
    for name, default in (("activation", "swish"), ("conv_activation", "swish")):
        field_of(hf, name, str, default=default, one_of={"swish", "silu"})
    field_of(hf, "conv_glu_type", str, default="swish", one_of={"swish", "silu"})
    field_of(hf, "nemo_activation", str, default="relu", one_of={"relu"})
    field_of(hf, "chunk_size", int, default=-1, one_of={-1})
    field_of(hf, "depthwise_multiplier", int, default=1, one_of={1})
    field_of(hf, "downsample_rate", int, default=1, one_of={1})
    hidden = field_of(hf, "hidden_size", int, default=1024)
    wide = field_of(hf, "ext_pw_out_channel", int, default=1024, one_of={hidden})
    field_of(hf, "depthwise_separable_out_channel", int, default=1024, one_of={hidden})
    return ConformerConfig(
        hidden=hidden,
        mlp=field_of(hf, "intermediate_size", int, default=1536),
        layers=field_of(hf, "num_blocks", int, default=24),
        heads=field_of(hf, "num_attention_heads", int, default=16),
        channels=field_of(hf, "nemo_conv_channels", int, default=1024),
        wide=wide,
        kernel=field_of(hf, "kernel_size", int, default=3),
        bins=field_of(hf, "input_size", int, default=80),
        reduction=field_of(hf, "time_reduction", int, default=8, one_of={2, 4, 8, 16}),
        distance=field_of(hf, "bias_max_distance", int, default=1000),
        symmetric=field_of(hf, "bias_symmetric", bool, default=False),
    )


class DistanceBias(RelativeBias):
    """A number per head and distance of a key, without buckets."""

    def __init__(self, c: ConformerConfig) -> None:
        self.symmetric = c.symmetric
        buckets = c.distance if c.symmetric else 2 * c.distance
        super().__init__(buckets, c.distance, c.heads, bidirectional=True)

    def bucket(self, distance: int) -> int:
        distance = min(distance, self.max_distance - 1)
        if self.symmetric:
            return min(abs(distance), self.buckets - 1)
        return distance + self.max_distance


class HalfMLP(nn.Module):
    """down(up * act(gate)) of up and gate, the halves of gate_up(layer_norm(x)); half of it."""

    def __init__(self, c: ConformerConfig) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(c.hidden, EPS)
        self.gate_up_proj = Linear(c.hidden, 2 * c.mlp, bias=True)
        self.down_proj = Linear(c.mlp, c.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up_proj(self.layer_norm(x))
        lazy_fusion.flush()
        up, gate = y.chunk(2, dim=-1)
        y = self.down_proj(up * F.silu(gate))
        lazy_fusion.flush()
        return 0.5 * y


class ConformerAttention(nn.Module):
    def __init__(self, c: ConformerConfig, bias: RelativeBias) -> None:
        super().__init__()
        size = c.hidden // c.heads
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.heads, size, True)
        self.o_proj = Linear(c.hidden, c.hidden, bias=True)
        self.attn = EncoderAttention(size, relative=bias)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        q, k, v = self.qkv_proj(x)
        y: Tensor = self.o_proj(self.attn(q, k, v, packing.starts, packing.longest))
        return y


class ConvModule(nn.Module):
    """Gated, then a convolution of each channel, then two matrices."""

    def __init__(self, c: ConformerConfig) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(c.hidden, EPS)
        self.gated, self.gated_bias = Learned(2 * c.wide, c.hidden, 1), Learned(2 * c.wide)
        self.b1, self.b2 = Learned(c.wide, 1), Learned(c.wide, 1)
        self.over_time, self.over_time_bias = Learned(c.hidden, 1, c.kernel), Learned(c.hidden)
        self.mixed, self.mixed_bias = Learned(c.wide, c.hidden, 1), Learned(c.wide)
        self.out, self.out_bias = Learned(c.wide, c.hidden, 1), Learned(c.wide)

    def forward(self, x: Tensor, behind: Tensor) -> Tensor:
        """x [T, E]. behind: [T] positions of the piece before each one."""
        y = self.layer_norm(x)
        lazy_fusion.flush()
        y = F.linear(y, self.gated.weight[..., 0], self.gated_bias.weight)
        up, gate = y.chunk(2, dim=-1)
        y = (up + self.b1.weight[:, 0]) * F.silu(gate + self.b2.weight[:, 0])
        kernel = self.over_time.weight[:, 0]  # [E, K]; the last step is the position itself
        total = self.over_time_bias.weight.expand_as(y)
        for back in range(kernel.shape[1]):
            shifted = y if not back else F.pad(y, (0, 0, back, 0))[: len(y)]
            seen = shifted * (behind >= back)[:, None]
            total = total + seen * kernel[:, kernel.shape[1] - 1 - back]
        y = F.silu(F.linear(total, self.mixed.weight[..., 0], self.mixed_bias.weight))
        return F.linear(y, self.out.weight[..., 0], self.out_bias.weight)


class ConformerLayer(nn.Module):
    def __init__(self, c: ConformerConfig, bias: RelativeBias) -> None:
        super().__init__()
        self.feed_forward_in, self.feed_forward_out = HalfMLP(c), HalfMLP(c)
        self.layer_norm_att, self.layer_norm = LayerNorm(c.hidden, EPS), LayerNorm(c.hidden, EPS)
        self.self_attn, self.conv = ConformerAttention(c, bias), ConvModule(c)

    def forward(self, x: Tensor, packing: Packing, behind: Tensor) -> Tensor:
        x = x + self.feed_forward_in(x)
        more = self.self_attn(self.layer_norm_att(x), packing)
        lazy_fusion.flush()
        x = x + more
        x = x + self.conv(x, behind)
        y: Tensor = self.layer_norm(x + self.feed_forward_out(x))
        lazy_fusion.flush()
        return y


class Subsampling(nn.Module):
    """Convolutions over time and bins, each of which halves both; then a matrix."""

    def __init__(self, c: ConformerConfig) -> None:
        super().__init__()
        self.first, self.first_bias = Learned(c.channels, 1, 3, 3), Learned(c.channels)
        steps, bins = int(math.log2(c.reduction)), c.bins
        for _ in range(steps):
            bins = (bins - 1) // 2 + 1
        self.each = nn.ModuleList(Learned(c.channels, 1, 3, 3) for _ in range(steps - 1))
        self.each_bias = nn.ModuleList(Learned(c.channels) for _ in range(steps - 1))
        self.mixed = nn.ModuleList(Learned(c.channels, c.channels, 1, 1) for _ in range(steps - 1))
        self.mixed_bias = nn.ModuleList(Learned(c.channels) for _ in range(steps - 1))
        self.out = Linear(c.channels * bins, c.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features [F, B] of one recording -> [ceil(F / reduction), E]."""
        y = F.relu(F.conv2d(x[None, None], self.first.weight, self.first_bias.weight, 2, 1))
        lists = self.each, self.each_bias, self.mixed, self.mixed_bias
        for modules in zip(*lists, strict=True):
            each, each_bias, mixed, mixed_bias = (cast(Tensor, one.weight) for one in modules)
            y = F.conv2d(y, each, each_bias, 2, 1, groups=y.shape[1])
            y = F.relu(F.conv2d(y, mixed, mixed_bias))
        made: Tensor = self.out(y[0].transpose(0, 1).flatten(1))
        return made


class AudioPart(nn.Module):
    """Encodes recordings. An item has one of the tensors

    features              float32 [F, B]
    features_with_images  the same, of a prompt that has images: its projection is another
    """

    def __init__(self, hf: Hf, width: int) -> None:
        """hf: the audio section. width: of rows."""
        super().__init__()
        self.config = c = conformer_config(hf)
        self.mean, self.inverse_std = Learned(c.bins), Learned(c.bins)
        self.embed = Subsampling(c)
        self.bias = DistanceBias(c)
        self.layers = nn.ModuleList(ConformerLayer(c, self.bias) for _ in range(c.layers))
        self.speech = MLPProjector(c.hidden, width, width)
        self.with_images = MLPProjector(c.hidden, width, width)

    @property
    def max_rows(self) -> int:
        """Rows of the longest recording."""
        return MAX_SECONDS * FRAMES_PER_SECOND // self.config.reduction

    def encode(self, items: Sequence[EncoderInput]) -> list[Tensor]:
        dtype = self.mean.weight.dtype
        pieces, lengths = [], []
        for one in items:
            features = next(iter(one.tensors.values())).to(dtype)
            x = self.embed((features - self.mean.weight) * self.inverse_std.weight)
            lazy_fusion.flush()
            lengths.append(len(x))
            if len(x) > PIECE:
                x = F.pad(x, (0, 0, 0, -len(x) % PIECE))
            pieces += x.split(PIECE)
        x, sizes = torch.cat(pieces), [len(one) for one in pieces]
        behind = to_device(np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]), x.device)
        packing = Packing.of(sizes, x.device)
        for layer in self.layers:
            x = layer(x, packing, behind)
        whole = [n if n <= PIECE else n + -n % PIECE for n in lengths]
        found = []
        for one, states, length in zip(items, x.split(whole), lengths, strict=True):
            beside = "features_with_images" in one.tensors
            rows = (self.with_images if beside else self.speech)(states[:length].contiguous())
            lazy_fusion.flush()
            found.append(rows)
        return found


def audio_names(layers: int, steps: int) -> dict[str, str]:
    """Names in checkpoints of transformers, below `audio_embed` -> ours, of parameters."""
    names = {
        "encoder.encoder_embedding.global_mean": "mean.weight",
        "encoder.encoder_embedding.global_invstd": "inverse_std.weight",
        "encoder.relative_attention_bias_layer.bias_values.weight": "bias.weight",
        "encoder.embed.conv.0.weight": "embed.first.weight",
        "encoder.embed.conv.0.bias": "embed.first_bias.weight",
    }
    for i in range(steps - 1):
        for place, ours in ((2 + 3 * i, "each"), (3 + 3 * i, "mixed")):
            names[f"encoder.embed.conv.{place}.weight"] = f"embed.{ours}.{i}.weight"
            names[f"encoder.embed.conv.{place}.bias"] = f"embed.{ours}_bias.{i}.weight"
    convolutions = {
        "glu.ext_pw_conv_1d": "gated",
        "dw_sep_conv_1d.dw_conv": "over_time",
        "dw_sep_conv_1d.pw_conv": "mixed",
        "ext_pw_conv_1d": "out",
    }
    for i in range(layers):
        outer, inner = f"encoder.encoders.{i}.conv", f"layers.{i}.conv"
        for theirs, ours in convolutions.items():
            names[f"{outer}.{theirs}.weight"] = f"{inner}.{ours}.weight"
            names[f"{outer}.{theirs}.bias"] = f"{inner}.{ours}_bias.weight"
        for name in ("b1", "b2"):
            names[f"{outer}.glu.{name}"] = f"{inner}.{name}.weight"
    return names


AUDIO_PATHS = {
    "encoder.embed.out": "embed.out",
    "encoder.encoders": "layers",
    "up_proj_for_speech": "speech.linear_1",
    "down_proj_for_speech": "speech.linear_2",
    "up_proj_for_vision_speech": "with_images.linear_1",
    "down_proj_for_vision_speech": "with_images.linear_2",
}
"""Paths in checkpoints of transformers, below `audio_embed` -> ours."""
