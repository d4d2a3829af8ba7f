"""Recordings of Gemma 4: a Conformer over log-mel features, a position for each 40 ms.

    x = x + mlp_1(x) / 2;  x = x + attn(x);  x = x + conv(x);  x = norm(x + mlp_2(x) / 2)

A position attends to itself and some before it, with a term of distance in the scores. Each
recording is computed by itself, so nothing is padded.

Source: transformers modeling_gemma4.py
Axes:   F frames, T positions, E hidden, H heads, D head size, W positions that one attends to
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.framework import lazy_fusion
from quire.layers import Linear, ParamModule, RMSNorm
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._clipped import ClippedLinear
from quire.models.multimodal._vit import Learned
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

MAX_SECONDS, FRAMES_PER_SECOND, REDUCTION = 30, 100, 4
"""Of a recording; quire.media.processors.gemma4 makes no more. Frames of a position."""
BINS = 128
NORM_EPS = 1e-6
"""Of norms that do not follow rms_norm_eps."""
AUDIO_PATHS = {"audio.subsample_conv_projection.input_proj_linear": "audio.input_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConformerConfig:
    hidden: int
    layers: int
    heads: int
    channels: tuple[int, int]
    kernel: int
    window: int  # W
    cap: float
    share: float  # of an MLP's result that is added
    eps: float
    most: float  # states are clipped to it
    clips: bool


def _config(hf: Hf) -> LocalConformerConfig:
    field_of(hf, "hidden_act", str, default="silu", one_of={"silu", "swish"})
    field_of(hf, "attention_context_right", int, default=0, one_of={0})
    left = field_of(hf, "attention_context_left", int, default=13)
    field_of(hf, "attention_chunk_size", int, default=12, one_of={left - 1})
    channels = field_of(hf, "subsampling_conv_channels", list, default=[128, 32])
    return LocalConformerConfig(
        hidden=field_of(hf, "hidden_size", int, default=1024),
        layers=field_of(hf, "num_hidden_layers", int, default=12),
        heads=field_of(hf, "num_attention_heads", int, default=8),
        channels=(channels[0], channels[1]),
        kernel=field_of(hf, "conv_kernel_size", int, default=5),
        window=left - 1,
        cap=field_of(hf, "attention_logit_cap", float, default=50.0),
        share=field_of(hf, "residual_weight", float, default=0.5),
        eps=field_of(hf, "rms_norm_eps", float, default=1e-6),
        most=field_of(hf, "gradient_clipping", float, default=1e10),
        clips=field_of(hf, "use_clipped_linears", bool, default=True),
    )


def bounded(x: Tensor, most: float) -> Tensor:
    lazy_fusion.flush()
    most = min(most, torch.finfo(x.dtype).max)
    return x.clamp(-most, most)


class ClippedFeedForward(nn.Module):
    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.most, self.share = c.most, c.share
        self.pre_layer_norm, self.post_layer_norm = (RMSNorm(c.hidden, NORM_EPS) for _ in range(2))
        self.ffw_layer_1 = ClippedLinear(c.hidden, 4 * c.hidden, clips=c.clips)
        self.ffw_layer_2 = ClippedLinear(4 * c.hidden, c.hidden, clips=c.clips)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ffw_layer_1(self.pre_layer_norm(bounded(x, self.most)))
        lazy_fusion.flush()
        y = self.post_layer_norm(bounded(self.ffw_layer_2(F.silu(y)), self.most))
        lazy_fusion.flush()
        return x + y * self.share


class LocalConformerAttention(ParamModule):
    per_dim_scale: Tensor

    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.window, self.cap, self.heads = c.window, c.cap, c.heads
        self.size = c.hidden // c.heads
        self.q_proj, self.k_proj, self.v_proj, self.post = (
            ClippedLinear(c.hidden, c.hidden, clips=c.clips) for _ in range(4)
        )
        self.relative_k_proj = Linear(c.hidden, c.hidden)
        self.declare("per_dim_scale")

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.size,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.02)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        """x [T, E]; distances [W, E]: of W - 1, W - 2, ... 0 positions."""
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        by_distance = self.relative_k_proj(distances.to(x.dtype))
        lazy_fusion.flush()
        factor = F.softplus(self.per_dim_scale.float())
        keys_factor = math.log(1 + math.e) / math.log(2)
        y = attend_locally(q, k.float() * keys_factor, v, by_distance, factor, self.cap)
        return self.post(y.to(x.dtype))


def attend_locally(
    q: Tensor, k: Tensor, v: Tensor, by_distance: Tensor, factor: Tensor, cap: float
) -> Tensor:
    """Attention of each position to itself and W - 1 before it, in float32.

    q, k, v: [T, E]. by_distance: [W, E], keys of distances from W - 1 down to 0. factor: [D], of
    queries. cap: scores are tanh'd to it. Returns [T, E].
    """
    window, size = len(by_distance), len(factor)
    q, k, v = (one.float().unflatten(1, (-1, size)) for one in (q, k, v))
    q = q * (size**-0.5 / math.log(2)) * factor
    keys, values = (F.pad(one, (0, 0, 0, 0, window - 1, 0)).unfold(0, window, 1) for one in (k, v))
    scores = torch.einsum("thd,thdk->thk", q, keys)
    relative = by_distance.float().unflatten(1, (-1, size))
    scores = scores + torch.einsum("thd,khd->thk", q, relative)
    scores = torch.tanh(scores / cap) * cap
    place = torch.arange(window, device=q.device)
    absent = place + torch.arange(len(q), device=q.device)[:, None] < window - 1  # [T, W]
    weights = scores.masked_fill(absent[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thk,thdk->thd", weights, values).flatten(1)


def distance_sinusoids(window: int, size: int, device: torch.device) -> Tensor:
    """Sines and cosines of each distance, the longest first: [W, E]."""
    half = size // 2
    step = math.log(10_000.0) / max(half - 1, 1)
    scales = torch.exp(torch.arange(half, device=device) * -step)
    distance = torch.arange(window - 1, -1, -1, device=device)
    angles = distance[:, None] * scales
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class CausalLightConv(nn.Module):
    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.most, self.kernel = c.most, c.kernel
        self.pre_layer_norm, self.conv_norm = (RMSNorm(c.hidden, c.eps) for _ in range(2))
        self.linear_start = ClippedLinear(c.hidden, 2 * c.hidden, clips=c.clips)
        self.depthwise_conv1d = Learned(c.hidden, 1, c.kernel)
        self.linear_end = ClippedLinear(c.hidden, c.hidden, clips=c.clips)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self._flushed(self.linear_start(self.pre_layer_norm(x))), dim=-1)
        padded = F.pad(y.T, (self.kernel - 1, 0))
        y = F.conv1d(padded[None], self.depthwise_conv1d.weight, groups=x.shape[1])[0].T
        y = self.conv_norm(bounded(y.contiguous(), self.most))
        return x + self._flushed(self.linear_end(F.silu(self._flushed(y))))

    def _flushed(self, x: Tensor) -> Tensor:
        lazy_fusion.flush()
        return x


class LocalConformerLayer(nn.Module):
    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.most = c.most
        self.feed_forward1, self.feed_forward2 = ClippedFeedForward(c), ClippedFeedForward(c)
        self.self_attn, self.lconv1d = LocalConformerAttention(c), CausalLightConv(c)
        self.norm_pre_attn, self.norm_post_attn, self.norm_out = (
            RMSNorm(c.hidden, NORM_EPS) for _ in range(3)
        )

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        x = self.feed_forward1(x)
        y = self.self_attn(self.norm_pre_attn(bounded(x, self.most)), distances)
        y = self.norm_post_attn(bounded(y, self.most))
        lazy_fusion.flush()
        x = self.feed_forward2(self.lconv1d(x + y))
        found: Tensor = self.norm_out(bounded(x, self.most))
        return found


class HalvingConv(nn.Module):
    """A convolution over time and bins that halves both, a norm of channels, ReLU."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.conv, self.norm, self.eps = Learned(outputs, inputs, 3, 3), Learned(outputs), eps

    def forward(self, x: Tensor) -> Tensor:
        """[inputs, F, bins] -> [outputs, F / 2, bins / 2]."""
        kernel = self.conv.weight
        y = F.conv2d(x[None].to(kernel.dtype), kernel, None, 2, 1)[0].permute(1, 2, 0)
        y = F.layer_norm(y, y.shape[-1:], self.norm.weight, None, self.eps)
        return F.relu(y).permute(2, 0, 1)


class LocalConformer(nn.Module):
    def __init__(self, hf: Hf) -> None:
        super().__init__()
        c = self.config = _config(hf)
        self.outputs = field_of(hf, "output_proj_dims", int, default=1536)
        first, second = c.channels
        self.subsample_conv_projection = nn.ModuleDict(
            {"layer0": HalvingConv(1, first, c.eps), "layer1": HalvingConv(first, second, c.eps)}
        )
        self.input_proj = Linear(first // REDUCTION * second, c.hidden)
        self.layers = nn.ModuleList(LocalConformerLayer(c) for _ in range(c.layers))
        self.output_proj = Linear(c.hidden, self.outputs, bias=True)

    @property
    def max_rows(self) -> int:
        """Rows of the longest recording."""
        return MAX_SECONDS * FRAMES_PER_SECOND // REDUCTION

    def forward(self, features: Tensor) -> Tensor:
        """[F, bins] -> [ceil(F / 4), outputs]."""
        first, second = self.subsample_conv_projection.values()
        x = second(first(features[None]))
        x = self.input_proj(x.permute(1, 2, 0).flatten(1))
        lazy_fusion.flush()
        distances = distance_sinusoids(self.config.window, self.config.hidden, x.device)
        for layer in self.layers:
            x = layer(x, distances)
        return self.output_proj(x)
