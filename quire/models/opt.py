"""OPT: learned positions, LayerNorm before (or, in the 350m, after) each half, ungated ReLU MLP.

Source: model_type "opt", https://huggingface.co/facebook/opt-125m; transformers modeling_opt.py
Axes:   T tokens in the step, E hidden, F mlp width, H heads, D head size, V vocab
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    Attention,
    ColumnLinear,
    Embedding,
    Linear,
    LMHead,
    PositionEmbedding,
    QKVLinear,
    RowLinear,
    add,
)
from quire.models._decoder import Decoder
from quire.models.base import Hf, ModelConfig, StepInputs, Weights, dtype_of, field_of

UNUSED_POSITIONS = 2  # the first rows of the position table, left over from padding
EPS = 1e-5  # not in config.json

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "nested_defaults": {
        "vocab_size": 50_272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    positions: int  # used rows of the position table
    word_size: int  # of a token's vector, before projection to hidden
    bias: bool
    norm_before: bool
    final_norm: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "layer_norm_elementwise_affine", bool, default=True, one_of={True})
        hidden, heads = (field_of(hf, f, int) for f in ("hidden_size", "num_attention_heads"))
        positions = field_of(hf, "max_position_embeddings", int)
        before = field_of(hf, "do_layer_norm_before", bool, default=True)
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=field_of(hf, "num_hidden_layers", int),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=field_of(hf, "ffn_dim", int),
            max_len=positions,
            norm_eps=EPS,
            act=field_of(hf, "activation_function", str, default="relu", one_of=ACTIVATION_KINDS),
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            positions=positions,
            word_size=field_of(hf, "word_embed_proj_dim", int, default=hidden),
            bias=field_of(hf, "enable_bias", bool, default=True),
            norm_before=before,
            final_norm=before and not field_of(hf, "_remove_final_layer_norm", bool, default=False),
        )


class SelfAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.heads, c.head_dim, c.bias)
        self.out_proj = RowLinear(c.hidden, c.hidden, c.bias)
        self.attn = Attention(c.heads, c.heads, c.head_dim)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        return self.out_proj(self.attn(q, k, v, step.attention))


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.norm_before = c.norm_before
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c)
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden, c.mlp, c.bias)
        self.act = Activation(c.act)
        self.fc2 = RowLinear(c.mlp, c.hidden, c.bias)

    def forward(
        self, x: Tensor, res: Tensor | None, step: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        if self.norm_before:
            x, res = self.self_attn_layer_norm(x, res)
            x = self.self_attn(x, step)
            x, res = self.final_layer_norm(x, res)
            return self.mlp(x), res
        x, _ = self.self_attn_layer_norm(self.self_attn(x, step), x)
        x, _ = self.final_layer_norm(self.mlp(x), x)
        return x, None

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # [T, E] -> [T, F] -> [T, E]


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.decoder.", "decoder."),
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_positions = PositionEmbedding(c.positions, c.hidden, skip=UNUSED_POSITIONS)
        self.norm = None
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps) if c.final_norm else None
        self.project_in = self.project_out = None
        if c.word_size != c.hidden:
            self.embed_tokens = Embedding(c.vocab, c.word_size)
            self.project_in = Linear(c.word_size, c.hidden)
            self.project_out = Linear(c.hidden, c.word_size)
            self.lm_head = LMHead(c.vocab, c.word_size)

    def embed(self, step: StepInputs) -> Tensor:
        x = super().embed(step)
        if self.project_in is not None:
            x = self.project_in(x)
        return add(x, self.embed_positions(step.positions))

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        if self.final_layer_norm is not None:
            x, _ = self.final_layer_norm(x, res)
        elif res is not None:
            x = add(x, res)
        return x if self.project_out is None else self.project_out(x)
