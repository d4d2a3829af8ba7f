"""Attention pooling of SigLIP's towers: one learned query attends to the states of an image.

    x = attn(probe, states);  x = x + mlp(norm(x))

Axes: N images, T tokens of all, n tokens of the longest, E hidden, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, Linear
from quire.models.multimodal._vit import Learned, VitConfig, VitMLP

POOL_ALIASES = {
    f"vision_model.head.{theirs}": f"pool.{ours}"
    for theirs, ours in {
        "probe": "probe.weight",
        "attention.in_proj_weight": "in_proj.weight",
        "attention.in_proj_bias": "in_proj.bias",
    }.items()
}
POOL_PATHS = {"vision_model.head.attention": "pool", "vision_model.head": "pool"}
"""Names in checkpoints -> ours, of a module `pool`."""


class AttentionPool(nn.Module):
    def __init__(self, c: VitConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.probe = Learned(c.hidden)
        self.in_proj = Linear(c.hidden, 3 * c.hidden, bias=True)
        self.out_proj = Linear(c.hidden, c.hidden, bias=True)
        self.layernorm = LayerNorm(c.hidden, c.eps)
        self.mlp = VitMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """States of images, packed [T, E] -> [N, E]. lengths: tokens of each image."""
        probe = self.in_proj(self.probe.weight.unsqueeze(0))
        states = self.in_proj(x)
        lazy_fusion.flush()
        query, _, _ = probe.view(1, 3, self.heads, -1).unbind(1)
        _, keys, values = states.view(len(x), 3, self.heads, -1).unbind(1)  # [T, H, D]
        k, v = (
            pad_sequence(list(one.split(list(lengths))), batch_first=True).transpose(1, 2)
            for one in (keys, values)
        )
        counts = torch.tensor(lengths, device=x.device)
        seen = torch.arange(max(lengths), device=x.device) < counts[:, None]
        q = query.expand(len(lengths), -1, -1).unsqueeze(2)  # [N, H, 1, D]
        pooled = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        y = self.out_proj(pooled.reshape(len(lengths), -1))
        more = self.mlp(self.layernorm(y))
        lazy_fusion.flush()
        return y + more
