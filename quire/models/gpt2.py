"""GPT-2: learned positions, LayerNorm before each half, q, k, v in one tensor, ungated MLP.

Its checkpoints store linear weights [inputs, outputs].

Source: model_type "gpt2", https://huggingface.co/openai-community/gpt2; transformers
        modeling_gpt2.py
Axes:   T tokens in the step, E hidden, F mlp width, H heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    AddLayerNorm,
    Attention,
    PositionEmbedding,
    QKVLinear,
    RowLinear,
    add,
)
from quire.models._decoder import Decoder, PlainMLP
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, dtype_of, field_of

CONVENTIONS = {"mlp_kind": "plain", "positions_kind": "learned", "tied": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    positions: int  # rows of the position table
    scales: tuple[float, ...]  # of attention scores, per layer

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "add_cross_attention", bool, default=False, one_of={False})
        names = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
        vocab, hidden, layers, heads, positions = (field_of(hf, name, int) for name in names)
        return cls(
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=field_of(hf, "n_inner", int, default=4 * hidden),
            max_len=positions,
            norm_eps=field_of(hf, "layer_norm_epsilon", float, default=1e-5),
            act=field_of(
                hf, "activation_function", str, default="gelu_new", one_of=ACTIVATION_KINDS
            ),
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            positions=positions,
            scales=_scales(hf, hidden // heads, layers),
        )


def _scales(hf: Hf, head_dim: int, layers: int) -> tuple[float, ...]:
    scaled = field_of(hf, "scale_attn_weights", bool, default=True)
    by_layer = field_of(hf, "scale_attn_by_inverse_layer_idx", bool, default=False)
    scale = head_dim**-0.5 if scaled else 1.0
    return tuple(scale / (i + 1) if by_layer else scale for i in range(layers))


class SelfAttention(nn.Module):
    def __init__(self, c: Config, scale: float) -> None:
        super().__init__()
        self.c_attn = QKVLinear(c.hidden, c.heads, c.heads, c.head_dim, bias=True)
        self.c_proj = RowLinear(c.hidden, c.hidden, bias=True)
        self.attn = Attention(c.heads, c.heads, c.head_dim, scale=scale)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.c_attn(x)  # each [T, H, D]
        return self.c_proj(self.attn(q, k, v, step.attention))


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = AddLayerNorm(c.hidden, c.norm_eps)
        self.attn = SelfAttention(c, c.scales[layer])
        self.ln_2 = AddLayerNorm(c.hidden, c.norm_eps)
        self.mlp = PlainMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.ln_1(x, res)
        x = self.attn(x, step)
        x, res = self.ln_2(x, res)
        return self.mlp(x), res


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("transformer.",),
        rename={"wte": "embed_tokens", "wpe": "embed_positions", "h": "layers", "ln_f": "norm"},
        transpose=("c_attn", "c_proj", "c_fc"),
        ignore=("*.attn.bias", "*.attn.masked_bias"),  # causal masks
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_positions = PositionEmbedding(c.positions, c.hidden)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps)

    def embed(self, step: StepInputs) -> Tensor:
        return add(super().embed(step), self.embed_positions(step.positions))
