"""Qwen-VL: a ViT whose learned positions are stretched, and learned queries that attend to its
states.

Source: model_type "qwen", https://huggingface.co/Qwen/Qwen-VL-Chat; arXiv 2308.12966
Axes:   N images, n patches of one, Q queries, C width of the tower, E hidden size of the text model
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import LayerNorm, Linear, QKVLinear
from quire.models.multimodal._base import Hf, Weights, field_of
from quire.models.multimodal._towers import ImageEncoder, text_hidden
from quire.models.multimodal._vit import (
    Learned,
    Vit,
    VitConfig,
    VitEmbeddings,
    VitLayer,
    vit_sizes,
)

EPS = 1e-6
POOL_HEAD = 128
"""Channels of a head of the queries."""
AT = "transformer.visual"


def stretched(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Stretch a square of learned positions [s * s, E] over a grid: [rows * columns, E]."""
    side = math.isqrt(len(table))
    cells = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    found = F.interpolate(cells, grid, mode="bicubic")[0]
    return found.flatten(1).T.to(table.dtype)


class StretchedEmbeddings(VitEmbeddings):
    def __init__(self, c: VitConfig, learned: int) -> None:
        """learned: positions of the table."""
        super().__init__(c)
        self.grid = c.grid
        self.position_embedding = Learned(learned, c.hidden)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch_embedding(patches)
        lazy_fusion.flush()
        table = stretched(self.position_embedding.weight, self.grid)
        return (x.view(-1, *table.shape) + table).flatten(0, 1)


class QwenVit(Vit):
    def __init__(self, c: VitConfig, learned: int) -> None:
        super().__init__(c)
        self.embeddings = StretchedEmbeddings(c, learned)
        size = c.hidden // c.heads
        # A checkpoint has queries, keys and values of a head together.
        order = [3 * head + part for part in range(3) for head in range(c.heads)]
        for layer in self.layers:
            attention = cast(VitLayer, layer).self_attn
            attention.qkv_proj = QKVLinear(
                c.hidden, c.heads, c.heads, size, bias=True, head_order=order
            )

    @property
    def tokens(self) -> int:
        return self.embeddings.patches


class QueryPool(nn.Module):
    """Learned queries attend to the states of a tower: [N, n, C] -> [N, Q, E]."""

    def __init__(self, inputs: int, outputs: int, queries: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.heads = grid, outputs // POOL_HEAD
        self.query = Learned(queries, outputs)
        self.pos_embed = Learned(queries, outputs)
        self.kv_proj = Linear(inputs, outputs)
        self.ln_q = LayerNorm(outputs, EPS)
        self.ln_kv = LayerNorm(outputs, EPS)
        self.in_proj = Learned(3 * outputs, outputs)
        self.in_bias = Learned(3 * outputs)
        self.out_proj = Linear(outputs, outputs, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        count, patches, _ = states.shape
        x = self.ln_kv(self.kv_proj(states.flatten(0, 1)))
        query = self.ln_q(self.query.weight)
        lazy_fusion.flush()
        x = x.view(count, patches, -1)
        places = self.pos_embed.weight
        parts = (query + places)[None], x + stretched(places, self.grid), x
        weights, biases = self.in_proj.weight.chunk(3), self.in_bias.weight.chunk(3)
        q, k, v = (
            F.linear(part, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, weight, bias in zip(parts, weights, biases, strict=True)
        )
        found = F.scaled_dot_product_attention(q.expand(count, -1, -1, -1), k, v)
        rows: Tensor = self.out_proj(found.transpose(1, 2).flatten(2).flatten(0, 1))
        return rows.view(count, -1, rows.shape[-1])


class Encoder(ImageEncoder):
    weights = Weights(
        strip=("transformer.visual.",),
        paths={
            "conv1": "tower.embeddings.patch_embedding",
            "ln_pre": "tower.pre_layrnorm",
            "transformer.resblocks": "tower.layers",
            "ln_1": "layer_norm1",
            "ln_2": "layer_norm2",
            "attn.in_proj": "self_attn.qkv_proj",
            "attn_pool.attn.out_proj": "attn_pool.out_proj",
            "attn.out_proj": "self_attn.out_proj",
            "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2",
        },
        alias={
            f"{AT}.positional_embedding": "tower.embeddings.position_embedding.weight",
            f"{AT}.attn_pool.query": "attn_pool.query.weight",
            f"{AT}.attn_pool.pos_embed": "attn_pool.pos_embed.weight",
            f"{AT}.attn_pool.attn.in_proj_weight": "attn_pool.in_proj.weight",
            f"{AT}.attn_pool.attn.in_proj_bias": "attn_pool.in_bias.weight",
            f"{AT}.proj": "proj.weight",
        },
    )

    def __init__(self, hf: Hf) -> None:
        super().__init__()
        visual = field_of(hf, "visual", dict)
        width = field_of(visual, "width", int)
        config = VitConfig(
            **vit_sizes(
                {
                    "hidden_size": width,
                    "num_hidden_layers": field_of(visual, "layers", int),
                    "num_attention_heads": field_of(visual, "heads", int),
                    "intermediate_size": int(width * field_of(visual, "mlp_ratio", float)),
                    "image_size": field_of(visual, "image_size", int),
                    "patch_size": field_of(visual, "patch_size", int),
                    "hidden_act": "gelu",
                    "layer_norm_eps": EPS,
                }
            ),
            patch_bias=False,
            first_norm=True,
        )
        self.width = field_of(visual, "output_dim", int)
        self.queries = field_of(visual, "n_queries", int, default=256)
        if self.width != text_hidden(hf) or self.width % POOL_HEAD:
            raise ConfigError(
                f"config.json: visual.output_dim is {self.width}; it must be hidden_size, "
                f"{text_hidden(hf)}, and a multiple of {POOL_HEAD}"
            )
        self.tower = QwenVit(config, self.queries)
        self.attn_pool = QueryPool(width, self.width, self.queries, config.grid)
        self.ln_post = LayerNorm(self.width, EPS)
        self.proj = Learned(self.width, self.width)

    @classmethod
    def from_hf(cls, hf: Hf) -> Encoder:
        return cls(hf)

    def max_rows(self, modality: str) -> int:
        return self.queries

    def project(self, states: list[Tensor]) -> Tensor:
        rows = self.ln_post(self.attn_pool(states[0]))
        lazy_fusion.flush()
        return torch.matmul(rows, self.proj.weight)
