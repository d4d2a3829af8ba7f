"""Recordings of Gemma 3n: the Conformer of a universal speech model, a row for each 160 ms.

    x = x + mlp_1(x) / 2;  x = x + attn(x);  x = x + conv(x);  x = norm(x + mlp_2(x) / 2)

Like Gemma 4's, without clipped matrices; a norm of the first convolutions adds up what came before
in time, and one in four positions is left at the end. Each recording is computed by itself.

Source: transformers modeling_gemma3n.py
Axes:   F frames, B mel bins, T positions, E hidden, D head size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Linear, ParamModule, RMSNorm
from quire.models.multimodal._base import Hf, field_of
from quire.models.multimodal._gemma4_audio import (
    NORM_EPS,
    CausalLightConv,
    ClippedFeedForward,
    LocalConformerConfig,
    attend_locally,
    bounded,
    distance_sinusoids,
)
from quire.models.multimodal._vit import Learned
from quire.weights.mapping import InitSpec, WeightShard, unsharded_layout

KERNEL, STRIDE = 3, 2
"""Of the first convolutions, on both axes."""


def _config(hf: Hf) -> LocalConformerConfig:
    field_of(hf, "conf_attention_context_right", int, default=0, one_of={0})
    for name, usual in (("kernel", KERNEL), ("stride", STRIDE)):
        sizes = field_of(hf, f"sscp_conv_{name}_size", list, default=[[usual] * 2] * 2)
        if [list(one) for one in sizes] != [[usual, usual]] * 2:
            raise ConfigError(
                f"config.json: audio_config.sscp_conv_{name}_size is {sizes}; both convolutions "
                f"must have [{usual}, {usual}]"
            )
    channels = field_of(hf, "sscp_conv_channel_size", list, default=[128, 32])
    return LocalConformerConfig(
        hidden=field_of(hf, "hidden_size", int, default=1536),
        layers=field_of(hf, "conf_num_hidden_layers", int, default=12),
        heads=field_of(hf, "conf_num_attention_heads", int, default=8),
        channels=(channels[0], channels[1]),
        kernel=field_of(hf, "conf_conv_kernel_size", int, default=5),
        window=field_of(hf, "conf_attention_context_left", int, default=13),
        cap=field_of(hf, "conf_attention_logit_cap", float, default=50.0),
        share=field_of(hf, "conf_residual_weight", float, default=0.5),
        eps=field_of(hf, "rms_norm_eps", float, default=1e-6),
        most=field_of(hf, "gradient_clipping", float, default=1e10),
        clips=False,
    )


class RelativeAttention(ParamModule):
    """Attention of each position to itself and those of a window before it."""

    per_dim_scale: Tensor

    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.size, self.cap = c.hidden // c.heads, c.cap
        self.q_proj, self.k_proj, self.v_proj = (Linear(c.hidden, c.hidden) for _ in range(3))
        self.pos_proj = Linear(c.hidden, c.hidden)
        self.declare("per_dim_scale")

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        """x [T, E]; distances [W, E]: of W - 1, W - 2, ... 0 positions."""
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        by_distance = self.pos_proj(distances.to(x.dtype))
        lazy_fusion.flush()
        factor = F.softplus(self.per_dim_scale.float())
        return attend_locally(q, k, v, by_distance, factor, self.cap).to(x.dtype)

    def layout(self, param: str) -> tuple[WeightShard, ...]:
        return unsharded_layout((self.size,))

    def init_spec(self, param: str) -> InitSpec:
        return InitSpec(0.0, 0.02)


class NormedAttention(nn.Module):
    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.most = c.most
        self.pre_attn_norm, self.post_norm = (RMSNorm(c.hidden, NORM_EPS) for _ in range(2))
        self.attn, self.post = RelativeAttention(c), Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        y = self.post(self.attn(self.pre_attn_norm(bounded(x, self.most)), distances))
        y = self.post_norm(bounded(y, self.most))
        lazy_fusion.flush()
        return x + y


class SpeechLayer(nn.Module):
    def __init__(self, c: LocalConformerConfig) -> None:
        super().__init__()
        self.most = c.most
        self.ffw_layer_start, self.ffw_layer_end = ClippedFeedForward(c), ClippedFeedForward(c)
        self.attention, self.lconv1d = NormedAttention(c), CausalLightConv(c)
        self.norm = RMSNorm(c.hidden, NORM_EPS)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        x = self.ffw_layer_end(self.lconv1d(self.attention(self.ffw_layer_start(x), distances)))
        found: Tensor = self.norm(bounded(x, self.most))
        lazy_fusion.flush()
        return found


class CumulativeConv(nn.Module):
    """A convolution that halves time and bins, a norm over what came before in time, ReLU."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.conv, self.norm = Learned(outputs, inputs, KERNEL, KERNEL), Learned(outputs)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[inputs, F, B] -> [outputs, F / 2, B / 2], rounded up."""
        kernel = self.conv.weight
        padded = F.pad(x[None], (1, 1, 0, KERNEL - 1)).to(kernel.dtype)
        y = F.conv2d(padded, kernel, None, STRIDE)[0].permute(1, 2, 0)  # [F, B, outputs]
        exact = y.float()
        count = torch.arange(1, len(y) + 1, device=y.device)[:, None, None] * y[0].numel()
        exact = exact - exact.sum((1, 2), keepdim=True).cumsum(0) / count
        variance = exact.square().sum((1, 2), keepdim=True).cumsum(0) / count
        exact = exact * torch.rsqrt(variance + self.eps) * self.norm.weight.float()
        return F.relu(exact.to(y.dtype)).permute(2, 0, 1)


class SpeechConformer(nn.Module):
    def __init__(self, hf: Hf) -> None:
        """hf: audio_config. Raises ConfigError."""
        super().__init__()
        c = self.config = _config(hf)
        bins = field_of(hf, "input_feat_size", int, default=128)
        self.reduction = field_of(hf, "conf_reduction_factor", int, default=4)
        eps = field_of(hf, "sscp_conv_group_norm_eps", float, default=1e-3)
        first, second = c.channels
        self.subsample_conv_projection = nn.ModuleDict(
            {
                "conv_0": CumulativeConv(1, first, eps),
                "conv_1": CumulativeConv(first, second, eps),
                "input_proj_linear": Linear(-(-bins // STRIDE**2) * second, c.hidden),
            }
        )
        self.conformer = nn.ModuleList(SpeechLayer(c) for _ in range(c.layers))

    def forward(self, features: Tensor) -> Tensor:
        """[F, B] -> [ceil(F / 16), E], with the usual reduction of 4."""
        first, second, project = self.subsample_conv_projection.values()
        x = second(first(features[None]))
        x = project(x.permute(1, 2, 0).flatten(1))
        lazy_fusion.flush()
        distances = distance_sinusoids(self.config.window, self.config.hidden, x.device)
        for layer in self.conformer:
            x = layer(x, distances)
        return x[:: self.reduction].contiguous()
