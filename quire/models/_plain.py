"""Skeleton of decoders with LayerNorm and an MLP of two matrices, with any kind of positions.

A family is a PlainConfig, read from its config.json, and the names in its checkpoint.

    in sequence                       in parallel, on one norm or two
    x = x + attn(norm_1(x))           x = x + attn(norm_1(x)) + mlp(norm_1 or norm_2 (x))
    x = x + mlp(norm_2(x))

Axes: T tokens in the step, E hidden, H query heads, K kv heads, D head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.layers import (
    AddLayerNorm,
    Attention,
    LayerNorm,
    LMHead,
    PositionEmbedding,
    QKVLinear,
    Rope,
    RopeConfig,
    RowLinear,
    add,
)
from quire.models._decoder import Decoder, PlainMLP
from quire.models._rope import rope_of, scaled_max_len
from quire.models.base import Hf, ModelConfig, StepInputs, sizes_of

USUAL_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "hidden_act": ("activation_function", "activation"),
}
"""Fields that sizes_of reads, and what config.json files of these families call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(ModelConfig):
    """What families differ in."""

    qkv_bias: bool = True
    out_bias: bool = True  # of the projection after attention
    mlp_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = False
    parallel: bool = False  # attention and MLP read the same residual
    norms: int = 2  # in a layer
    embed_norm: bool = False  # embeddings are normed
    positions: int = 0  # rows of the table of learned positions; 0: there is none
    rope: RopeConfig | None = None
    interleaved: bool = False  # rotary pairs are neighbours
    alibi: tuple[float, ...] | None = None  # slope of each head
    scales: tuple[float, ...] = ()  # of attention scores, per layer; (): D ** -0.5
    head_order: tuple[int, ...] | None = None  # in a fused qkv tensor, see QKVLinear
    qkv_limit: float | None = None  # q, k, v are clipped to it


def plain_sizes(hf: Hf, *, tied: bool = True) -> dict[str, Any]:
    """The fields of ModelConfig, under the usual names or those of these families.

    An MLP without a width of its own is four times as wide as the rest.
    """
    found: dict[str, Any] = {"rms_norm_eps": 1e-5, **hf}
    for usual, others in USUAL_NAMES.items():
        for name in (usual, *others):
            if hf.get(name) is not None:
                found[usual] = hf[name]
                break
    if type(hidden := found.get("hidden_size")) is int and found.get("intermediate_size") is None:
        found["intermediate_size"] = 4 * hidden
    return sizes_of(found, tied=tied)


def plain_rotary_sizes(hf: Hf, *, tied: bool = True) -> dict[str, Any]:
    """plain_sizes, `rope`, and max_len as the scaling stretches it."""
    sizes = plain_sizes(hf, tied=tied)
    return {**sizes, "max_len": scaled_max_len(hf), "rope": rope_of(hf, sizes["head_dim"])}


def alibi_slopes(heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """Slope of each head: 2 ** -(i * steepest / n) for n heads, counted from 1.

    If n is not a power of two: those of the next lower one, then every other one of the next higher
    """
    lower = 1 << int(math.log2(heads))

    def powers(count: int) -> list[float]:
        return [2.0 ** -(i * steepest / count) for i in range(1, count + 1)]

    return tuple((powers(lower) + powers(2 * lower)[::2])[:heads])


def grouped_head_order(heads: int, kv_heads: int) -> tuple[int, ...]:
    """Places of heads in a tensor that has, for each KV head, its queries, the key and the value.

    With one KV head these are all queries, the key, the value; with as many as queries, each head's
    three.
    """
    group = heads // kv_heads
    places = [range(k * (group + 2), (k + 1) * (group + 2)) for k in range(kv_heads)]
    queries = [place for own in places for place in own[:group]]
    return (*queries, *(own[-2] for own in places), *(own[-1] for own in places))


class PlainAttention(nn.Module):
    def __init__(self, c: PlainConfig, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(
            c.hidden,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.qkv_bias,
            head_order=c.head_order,
            limit=c.qkv_limit,
        )
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.out_bias)
        self.rope: nn.Module | None = None
        if c.rope is not None:
            self.rope = Rope(c.rope, c.max_len, interleaved=c.interleaved)
        self.attn = Attention(
            c.heads,
            c.kv_heads,
            c.head_dim,
            scale=c.scales[layer] if c.scales else None,
            window=c.window(layer),
            alibi=c.alibi,
        )

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [T, H, D] [T, K, D] [T, K, D]
        if self.rope is not None:
            q, k = self.rope(q, k, step.positions)
        return self.out_proj(self.attn(q, k, v, step.attention))


class PlainLayer(nn.Module):
    attention_class: ClassVar[Any] = PlainAttention

    def __init__(self, c: PlainConfig, layer: int) -> None:
        super().__init__()
        self.parallel = c.parallel
        self.norm_1 = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        self.attn = self.attention_class(c, layer)
        self.norm_2 = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias) if c.norms == 2 else None
        self.mlp = PlainMLP(c.hidden, c.mlp, c.act, c.mlp_bias)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.norm_1(x, res)
        attended = self.attn(x, step)
        if not self.parallel:
            assert self.norm_2 is not None
            x, res = self.norm_2(attended, res)
            return self.mlp(x), res
        if self.norm_2 is not None:
            x, _ = self.norm_2(res, None)
        return add(attended, self.mlp(x)), res


class PlainDecoder(Decoder):
    layer_class: ClassVar[Any] = PlainLayer

    def __init__(self, c: PlainConfig) -> None:
        super().__init__(c)
        self.embed_positions = PositionEmbedding(c.positions, c.hidden) if c.positions else None
        self.embed_norm = LayerNorm(c.hidden, c.norm_eps, c.norm_bias) if c.embed_norm else None
        self.norm = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        if c.head_bias:
            self.lm_head = LMHead(c.vocab, c.hidden, bias=True)

    def embed(self, step: StepInputs) -> Tensor:
        x = super().embed(step)
        if self.embed_positions is not None:
            x = add(x, self.embed_positions(step.positions))
        return x if self.embed_norm is None else self.embed_norm(x)
