"""MobileNet-v5, the vision tower of Gemma 3n: convolutions, and attention of one KV head.

Each stage halves the map. The maps of the last two stages are joined at the size of the larger one,
projected, and averaged over squares. All maps have channels last.

    fused      x + norm(1x1(act(norm(conv k x k))))                the stages near the image
    inverted   x + g norm(1x1(act(norm(dw(act(norm(1x1(norm(dw x))))))))
    attention  x + g proj(attn(norm x)), whose keys and values may be of every second place

dw is a convolution of each channel, g a learned factor of each channel. A block that changes the
size or the channels of a map has no x +.

Source: mobilenetv5_300m_enc, https://huggingface.co/google/gemma-3n-E4B-it; timm mobilenetv5.py
Axes:   N images, R rows and C columns of a map, E channels, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, Conv2d, ParamModule, PatchLinear, RMSNorm, add
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

EPS = 1e-6
ACT = "gelu_pytorch_tanh"
GROWTH = 2
"""Channels of the joined maps, between the matrices that project them, per channel of these."""


@dataclass(frozen=True, slots=True)
class Fused:
    outputs: int
    growth: int  # channels between the two convolutions, per channel of the input
    stride: int = 1
    kernel: int = 3


@dataclass(frozen=True, slots=True)
class Inverted:
    outputs: int
    growth: int
    first: int = 0  # size of the kernel of each channel before the matrices; 0: none
    middle: int = 0  # of that between them
    stride: int = 1


@dataclass(frozen=True, slots=True)
class MultiQuery:
    outputs: int
    heads: int
    size: int
    stride: int = 1  # of keys and values
    kernel: int = 3  # that makes these fewer


Block = Fused | Inverted | MultiQuery


@dataclass(frozen=True, slots=True)
class Layout:
    """stem: channels of the first convolution, which halves an image."""

    stem: int
    stages: tuple[tuple[Block, ...], ...]

    @property
    def joined(self) -> int:
        """Channels of the maps that are joined."""
        return sum(stage[-1].outputs for stage in self.stages[-2:])


LAYOUTS = {
    "mobilenetv5_300m_enc": Layout(
        64,
        (
            (Fused(128, 4, 2), Fused(128, 4), Fused(128, 4)),
            (
                Inverted(256, 6, 3, 5, 2),
                *(Inverted(256, 4, kernel) for kernel in (5, 3, 5, 3)),
            ),
            (
                Inverted(640, 6, 5, 5, 2),
                *(Inverted(640, 4, 5),) * 7,
                Inverted(640, 1),
                *(MultiQuery(640, 12, 64, 2), Inverted(640, 2)) * 14,
            ),
            (
                Inverted(1280, 6, 5, 5, 2),
                *(MultiQuery(1280, 16, 96), Inverted(1280, 2)) * 19,
            ),
        ),
    )
}
"""Names of the architecture in config.json -> what it is made of."""


class SameConv2d(Conv2d):
    """Keeps the size of a map, or divides it by the stride and rounds up: `same` padding, of which
    the bottom and the right side get more."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, 0, groups, bias=bias)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        lazy_fusion.flush()
        rows, columns = (self._missing(size) for size in x.shape[1:3])
        sides = (0, 0, columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        return super().forward(functional.pad(x, sides))

    def _missing(self, size: int) -> int:
        return max((-(-size // self.stride) - 1) * self.stride + self.kernel - size, 0)


class Pointwise(PatchLinear):
    """One matrix for each place of a map: a convolution of 1 x 1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, (1, 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N, R, C, E']."""
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class MapNorm(RMSNorm):
    """Over the channels of each place."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class ConvNorm(nn.Module):
    """A convolution and a norm, and an activation if `act`."""

    def __init__(self, conv: Conv2d | Pointwise, outputs: int, *, act: bool = False) -> None:
        super().__init__()
        self.conv, self.bn = conv, MapNorm(outputs)
        self.act = Activation(ACT) if act else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return x if self.act is None else self.act(x)


class ChannelScale(ParamModule):
    """A factor of each channel."""

    gamma: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.declare("gamma")

    def forward(self, x: Tensor) -> Tensor:
        lazy_fusion.flush()
        return x * self.gamma

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.size,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(1.0, 0.02)


class FusedBlock(nn.Module):
    def __init__(self, inputs: int, c: Fused) -> None:
        super().__init__()
        wide = inputs * c.growth
        self.is_sum = inputs == c.outputs and c.stride == 1
        self.conv_exp, self.bn1 = SameConv2d(inputs, wide, c.kernel, c.stride), MapNorm(wide)
        self.act = Activation(ACT)
        self.conv_pwl, self.bn2 = Pointwise(wide, c.outputs), MapNorm(c.outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_pwl(self.act(self.bn1(self.conv_exp(x)))))
        return add(y, x) if self.is_sum else y


class InvertedBlock(nn.Module):
    def __init__(self, inputs: int, c: Inverted, *, scales: bool = True, sums: bool = True) -> None:
        super().__init__()
        wide = inputs * c.growth
        self.is_sum = sums and inputs == c.outputs and c.stride == 1
        self.dw_start = self.dw_mid = None
        if c.first:
            stride = 1 if c.middle else c.stride
            self.dw_start = ConvNorm(SameConv2d(inputs, inputs, c.first, stride, inputs), inputs)
        self.pw_exp = ConvNorm(Pointwise(inputs, wide), wide, act=True)
        if c.middle:
            conv = SameConv2d(wide, wide, c.middle, c.stride, wide)
            self.dw_mid = ConvNorm(conv, wide, act=True)
        self.pw_proj = ConvNorm(Pointwise(wide, c.outputs), c.outputs)
        self.layer_scale = ChannelScale(c.outputs) if scales else None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.dw_start is None else self.dw_start(x)
        y = self.pw_exp(y)
        y = self.pw_proj(y if self.dw_mid is None else self.dw_mid(y))
        y = y if self.layer_scale is None else self.layer_scale(y)
        return add(y, x) if self.is_sum else y


class Reduced(nn.Module):
    """Keys or values: a matrix, after a convolution that leaves every `stride`-th place."""

    def __init__(self, inputs: int, c: MultiQuery) -> None:
        super().__init__()
        self.down_conv = self.norm = None
        if c.stride > 1:
            self.down_conv = SameConv2d(inputs, inputs, c.kernel, c.stride, inputs)
            self.norm = MapNorm(inputs)
        self.proj = Pointwise(inputs, c.size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, R, C, E] -> [N, 1, R' C', D]."""
        if self.down_conv is not None and self.norm is not None:
            x = self.norm(self.down_conv(x))
        return self.proj(x).flatten(1, 2).unsqueeze(1)


class MultiQueryAttention(nn.Module):
    """All heads read the same keys and values."""

    def __init__(self, inputs: int, c: MultiQuery) -> None:
        super().__init__()
        self.heads, self.size = c.heads, c.size
        self.query = nn.ModuleDict({"proj": Pointwise(inputs, c.heads * c.size)})
        self.key, self.value = Reduced(inputs, c), Reduced(inputs, c)
        self.output = nn.ModuleDict({"proj": Pointwise(c.heads * c.size, c.outputs)})

    def forward(self, x: Tensor) -> Tensor:
        q = self.query["proj"](x).view(len(x), -1, self.heads, self.size).transpose(1, 2)
        k, v = (one.expand(-1, self.heads, -1, -1) for one in (self.key(x), self.value(x)))
        lazy_fusion.flush()
        y = functional.scaled_dot_product_attention(q, k, v)  # [N, H, R C, D]
        y = y.transpose(1, 2).reshape(*x.shape[:-1], -1)
        found: Tensor = self.output["proj"](y)
        return found


class AttentionBlock(nn.Module):
    def __init__(self, inputs: int, c: MultiQuery) -> None:
        super().__init__()
        self.norm, self.attn = MapNorm(inputs), MultiQueryAttention(inputs, c)
        self.layer_scale = ChannelScale(c.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return add(self.layer_scale(self.attn(self.norm(x))), x)


class FusionAdapter(nn.Module):
    """Joins maps, projects them and averages squares, so that there are side x side places."""

    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.ffn = InvertedBlock(inputs, Inverted(outputs, GROWTH), scales=False, sums=False)
        self.norm = MapNorm(outputs)

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        """[N, R, C, E], [N, R / 2, C / 2, E'] -> [N, side, side, outputs]."""
        lazy_fusion.flush()
        times = large.shape[1] // small.shape[1]
        small = small.repeat_interleave(times, 1).repeat_interleave(times, 2)
        y = self.ffn(torch.cat((large, small), dim=-1))
        lazy_fusion.flush()
        square = large.shape[1] // self.side
        cells = y.unflatten(2, (-1, square)).unflatten(1, (-1, square))
        found: Tensor = self.norm(cells.float().mean((2, 4)).to(y.dtype))
        return found


class MobileNetV5(nn.Module):
    def __init__(self, layout: Layout, outputs: int, side: int) -> None:
        """side: places along a side of the result."""
        super().__init__()
        stem = SameConv2d(3, layout.stem, 3, 2, bias=True)
        self.conv_stem = ConvNorm(stem, layout.stem, act=True)
        self.blocks, inputs = nn.ModuleList(), layout.stem
        for stage in layout.stages:
            made: list[nn.Module] = []
            for block in stage:
                made.append(_block(inputs, block))
                inputs = block.outputs
            self.blocks.append(nn.ModuleList(made))
        self.msfa = FusionAdapter(layout.joined, outputs, side)
        self.slices = sum(map(len, layout.stages))

    def in_slices(self, images: Tensor) -> Generator[None, None, Tensor]:
        """Normalized images [N, R, R, 3] -> [N, side * side, outputs]; stops behind each block."""
        x, maps = self.conv_stem(images), []
        for stage in self.blocks:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
                yield
            maps.append(x)
        y: Tensor = self.msfa(*maps[-2:])
        return y.flatten(1, 2)


def _block(inputs: int, c: Block) -> nn.Module:
    if isinstance(c, Fused):
        return FusedBlock(inputs, c)
    return InvertedBlock(inputs, c) if isinstance(c, Inverted) else AttentionBlock(inputs, c)


def layout_of(name: str) -> Layout:
    """Return the layout of an architecture. Raises ConfigError."""
    if name not in LAYOUTS:
        raise ConfigError(
            f"config.json: vision_config.architecture is {name!r:.80}; known are "
            f"{', '.join(LAYOUTS)}"
        )
    return LAYOUTS[name]
