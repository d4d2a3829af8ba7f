"""DaViT, the tower of Florence-2: four stages, whose layers attend in windows, then over channels.

    stage    a convolution makes the map of the next one, which is smaller and wider
    layer    x = x + conv(x); x = x + attn(norm(x)); x = x + conv(x); x = x + mlp(norm(x))
             first with attention of each window's positions, then with attention of channels

Source: transformers modeling_florence2.py
Axes:   N images, R rows and C columns of a map, E its numbers at each place, H heads or groups
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ACTIVATION_KINDS, Conv2d, LayerNorm, Linear
from quire.models.base import Hf, field_of
from quire.models.multimodal._vit import VitMLP

EPS = 1e-5  # not in config.json
DEFAULTS = {
    "in_channels": 3,
    "depths": [1, 1, 9, 1],
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "embed_dim": [128, 256, 512, 1024],
    "num_heads": [4, 8, 16, 32],
    "num_groups": [4, 8, 16, 32],
    "window_size": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "activation_function": "gelu",
}
"""What a vision section leaves out."""
_LISTS = (
    *("depths", "patch_size", "patch_stride", "patch_padding"),
    *("patch_prenorm", "embed_dim", "num_heads", "num_groups"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Sizes of a stage. window: places of each side of one."""

    inputs: int
    hidden: int
    depth: int
    kernel: int
    stride: int
    padding: int
    norm_first: bool
    heads: int
    groups: int
    window: int
    mlp: int
    qkv_bias: bool
    act: str

    def side(self, side: int) -> int:
        """Places of a side of its map, of those of the map before."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


def read_stages(hf: Hf) -> list[Stage]:
    """Read a vision section. Raises ConfigError."""
    hf = {**DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    lists = {name: field_of(hf, name, list) for name in _LISTS}
    if len({len(one) for one in lists.values()}) != 1 or not lists["depths"]:
        raise ConfigError(f"config.json: {', '.join(_LISTS)} must have an entry for each stage")
    widths = lists["embed_dim"]
    inputs = [field_of(hf, "in_channels", int), *widths]
    ratio = field_of(hf, "mlp_ratio", float)
    return [
        Stage(
            inputs=inputs[i],
            hidden=widths[i],
            depth=lists["depths"][i],
            kernel=lists["patch_size"][i],
            stride=lists["patch_stride"][i],
            padding=lists["patch_padding"][i],
            norm_first=lists["patch_prenorm"][i],
            heads=lists["num_heads"][i],
            groups=lists["num_groups"][i],
            window=field_of(hf, "window_size", int),
            mlp=int(widths[i] * ratio),
            qkv_bias=field_of(hf, "qkv_bias", bool),
            act=field_of(hf, "activation_function", str, one_of=ACTIVATION_KINDS),
        )
        for i in range(len(widths))
    ]


class ConvEmbed(nn.Module):
    """The convolution at the start of a stage, and a norm before or after it."""

    def __init__(self, s: Stage) -> None:
        super().__init__()
        self.norm_first = s.norm_first
        self.conv = Conv2d(s.inputs, s.hidden, s.kernel, s.stride, s.padding)
        self.norm = LayerNorm(s.inputs if s.norm_first else s.hidden, EPS)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            return self.conv(_at_places(self.norm, x))
        return _at_places(self.norm, self.conv(x))


class WindowAttention(nn.Module):
    """Attention among the places of each window. What pads the last windows is attended."""

    def __init__(self, s: Stage) -> None:
        super().__init__()
        self.heads, self.window = s.heads, s.window
        self.qkv = Linear(s.hidden, 3 * s.hidden, s.qkv_bias)
        self.proj = Linear(s.hidden, s.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        lazy_fusion.flush()
        count, rows, columns, width = x.shape
        w = self.window
        x = pad(x, (0, 0, 0, -columns % w, 0, -rows % w))
        high, wide = x.shape[1] // w, x.shape[2] // w
        windows = x.view(count, high, w, wide, w, width).transpose(2, 3).reshape(-1, width)
        qkv = self.qkv(windows)
        lazy_fusion.flush()
        q, k, v = qkv.view(-1, w * w, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width)
        y = self.proj(found)
        lazy_fusion.flush()
        y = y.view(count, high, wide, w, w, width).transpose(2, 3)
        return y.reshape(count, high * w, wide * w, width)[:, :rows, :columns].contiguous()


class ChannelAttention(nn.Module):
    """Attention among the channels of each group: a channel's vector is all of the map."""

    def __init__(self, s: Stage) -> None:
        super().__init__()
        self.groups = s.groups
        self.qkv = Linear(s.hidden, 3 * s.hidden, s.qkv_bias)
        self.proj = Linear(s.hidden, s.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        count, rows, columns, width = x.shape
        places = rows * columns
        qkv = self.qkv(x.view(-1, width))
        lazy_fusion.flush()
        qkv = qkv.view(count, places, 3, self.groups, width // self.groups)
        q, k, v = qkv.permute(2, 0, 3, 4, 1)  # each [N, H, E / H, places]
        found = scaled_dot_product_attention(q, k, v)  # its scale is that of `places` numbers
        y = self.proj(found.permute(0, 3, 1, 2).reshape(-1, width))
        return y.view(x.shape)


class DaViTBlock(nn.Module):
    """Attention and an MLP, each after a convolution of each channel."""

    def __init__(self, s: Stage, attention: str) -> None:
        super().__init__()
        self.conv1 = Conv2d(s.hidden, s.hidden, 3, 1, 1, groups=s.hidden)
        self.norm1 = LayerNorm(s.hidden, EPS)
        kind = WindowAttention if attention == "window_attn" else ChannelAttention
        self.attn = kind(s)
        self.conv2 = Conv2d(s.hidden, s.hidden, 3, 1, 1, groups=s.hidden)
        self.norm2 = LayerNorm(s.hidden, EPS)
        self.ffn = VitMLP(s.hidden, s.mlp, s.act)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x) + x
        attended = self.attn(_at_places(self.norm1, x))
        lazy_fusion.flush()
        x = x + attended
        x = self.conv2(x) + x
        more = _at_places(self.ffn, _at_places(self.norm2, x))
        lazy_fusion.flush()
        return x + more


class DaViTLayer(nn.Module):
    def __init__(self, s: Stage) -> None:
        super().__init__()
        self.spatial_block = DaViTBlock(s, "window_attn")
        self.channel_block = DaViTBlock(s, "channel_attn")

    def forward(self, x: Tensor) -> Tensor:
        x = self.spatial_block(x)
        x = self.channel_block(x)
        return x


class DaViT(nn.Module):
    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ConvEmbed(one) for one in stages)
        self.blocks = nn.ModuleList(
            nn.ModuleList(DaViTLayer(one) for _ in range(one.depth)) for one in stages
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalized images [N, H, W, 3] -> the last map [N, R, C, E]."""
        for conv, layers in zip(self.convs, self.blocks):
            x = conv(x)
            for layer in layers:  # type: ignore[attr-defined]
                x = layer(x)
        return x


def _at_places(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module of vectors at each place of a map."""
    y: Tensor = module(x.reshape(-1, x.shape[-1]))
    lazy_fusion.flush()
    return y.view(*x.shape[:-1], -1)
