"""Encoders without learned positions: rotary ones or ALiBi, and a gated or a plain MLP.

    x = norm(x + attn(x))
    x = norm(x + mlp(x))

Axes: T tokens in the step, E hidden, F mlp width, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    Attention,
    ColumnLinear,
    GatedActivation,
    QKVLinear,
    Rope,
    RopeConfig,
    RowLinear,
    TypeEmbedding,
)
from quire.models._encoder import Encoder, EncoderConfig
from quire.models._rope import rope_of
from quire.models.base import CarriedStates, Hf, StepInputs, dtype_of, field_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryEncoderConfig(EncoderConfig):
    """What these families differ in."""

    rope: RopeConfig | None  # None: ALiBi
    interleaved: bool = False  # rotary pairs are neighbours
    alibi: tuple[float, ...] | None = None  # slope of each head
    gated: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = False  # of the first matrix of the MLP
    down_bias: bool = True


def rotary_encoder_sizes(hf: Hf, *, eps: float = 1e-12, theta: float | None) -> dict[str, Any]:
    """Fields of RotaryEncoderConfig, of the usual names. theta: None: there is no rotation."""
    field_of(hf, "is_decoder", bool, default=False, one_of={False})
    hidden, heads = field_of(hf, "hidden_size", int), field_of(hf, "num_attention_heads", int)
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads}; it must divide hidden_size, {hidden}"
        )
    max_len, types = (
        field_of(hf, "max_position_embeddings", int),
        field_of(hf, "type_vocab_size", int, default=0),
    )
    return {
        "vocab": field_of(hf, "vocab_size", int),
        "hidden": hidden,
        "layers": field_of(hf, "num_hidden_layers", int),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "mlp": field_of(hf, "intermediate_size", int),
        "max_len": max_len,
        "norm_eps": field_of(hf, "layer_norm_eps", float, default=eps),
        "act": field_of(hf, "hidden_act", str, default="gelu", one_of=ACTIVATION_KINDS),
        "tied": field_of(hf, "tie_word_embeddings", bool, default=True),
        "dtype": dtype_of(hf),
        "bidirectional": True,
        "word_size": hidden,
        "positions": 0,
        "types": (types,) if types else (),
        "rope": None if theta is None else rope_of(hf, hidden // heads, theta=theta),
    }


class UpGateLinear(ColumnLinear):
    """Gate and up rows as one matrix; a checkpoint's one tensor has the up rows first."""

    def split_fused(self, param: str, tensor: Tensor) -> Sequence[Tensor]:
        return super().split_fused(param, tensor)[::-1]


class RotarySelfAttention(nn.Module):
    def __init__(self, c: RotaryEncoderConfig) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.qkv_bias)
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, c.out_bias)
        self.rope: Rope | None = None
        if c.rope is not None:
            self.rope = Rope(c.rope, c.max_len, interleaved=c.interleaved)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, alibi=c.alibi)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        if self.rope is not None:
            q, k = self.rope(q, k, step.positions)
        return self.out_proj(self.attn(q, k, v, step.attention))


class EncoderMLP(nn.Module):
    """[T, E] -> [T, E]."""

    up_class: ClassVar[type[ColumnLinear]] = UpGateLinear

    def __init__(self, c: RotaryEncoderConfig) -> None:
        super().__init__()
        self.act: nn.Module
        if c.gated:
            self.gate_up_proj = self.up_class(c.hidden, (c.mlp, c.mlp), c.up_bias)
            self.act = GatedActivation(c.act)
        else:
            self.gate_up_proj = ColumnLinear(c.hidden, c.mlp, c.up_bias)
            self.act = Activation(c.act)
        self.down_proj = RowLinear(c.mlp, c.hidden, c.down_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class RotaryEncoderLayer(nn.Module):
    def __init__(self, c: RotaryEncoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn: nn.Module = RotarySelfAttention(c)
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.mlp: nn.Module = EncoderMLP(c)
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, _ = self.self_attn_layer_norm(self.self_attn(x, step), x)
        return self.final_layer_norm(self.mlp(x), x)[0], None


class RotaryEncoder(Encoder):
    """Base of these encoders. Vectors of tokens and of their types are summed and normed."""

    layer_class: ClassVar[Any] = RotaryEncoderLayer

    def build_positions(self, c: EncoderConfig) -> nn.Module | None:
        return TypeEmbedding(c.max_len, c.word_size, *c.types) if c.types else None
