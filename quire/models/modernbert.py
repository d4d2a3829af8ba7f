"""ModernBERT: norms before each part, rotary positions, windows in two of three layers, gated MLP.

A token of a windowed layer sees local_attention / 2 tokens on each side.

Source: model_type "modernbert", https://huggingface.co/answerdotai/ModernBERT-base; transformers
modeling_modernbert.py
Axes:   T tokens in the step, E hidden, F mlp width, H heads, D head size
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    Attention,
    ClassifierLinear,
    ClassifierNorm,
    ColumnLinear,
    GatedActivation,
    LayerNorm,
    Linear,
    LogitsBias,
    QKVLinear,
    Rope,
    RopeConfig,
    RowLinear,
)
from quire.models._decoder import Decoder
from quire.models._rope import rope_of, section_of
from quire.models._windows import FULL, SLIDING, windows_of
from quire.models.base import (
    CarriedStates,
    Hf,
    ModelConfig,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)

CONVENTIONS = {"tied": True, "bidirectional": True}
THETA = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""Kind of a layer -> the field of its rotary base in older files, and the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ModelConfig):
    rope: RopeConfig  # of layers that see all
    local_rope: RopeConfig  # of layers with a window
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    head_act: str
    head_bias: bool
    logits_bias: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        hidden, heads = field_of(hf, "hidden_size", int), field_of(hf, "num_attention_heads", int)
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"config.json: num_attention_heads is {heads}; it must divide hidden_size, {hidden}"
            )
        layers = field_of(hf, "num_hidden_layers", int)
        every = field_of(hf, "global_attn_every_n_layers", int, default=3)
        window = field_of(hf, "local_attention", int, default=128) // 2 + 1
        kinds = [SLIDING if i % every else FULL for i in range(layers)]
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=field_of(hf, "intermediate_size", int),
            max_len=field_of(hf, "max_position_embeddings", int),
            norm_eps=field_of(hf, "norm_eps", float, default=1e-5),
            act=field_of(hf, "hidden_activation", str, default="gelu", one_of=ACTIVATION_KINDS),
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            bidirectional=True,
            windows=windows_of(hf, window, kinds),
            rope=_rope(hf, FULL, hidden // heads),
            local_rope=_rope(hf, SLIDING, hidden // heads),
            norm_bias=field_of(hf, "norm_bias", bool, default=False),
            attention_bias=field_of(hf, "attention_bias", bool, default=False),
            mlp_bias=field_of(hf, "mlp_bias", bool, default=False),
            head_act=field_of(
                hf, "classifier_activation", str, default="gelu", one_of=ACTIVATION_KINDS
            ),
            head_bias=field_of(hf, "classifier_bias", bool, default=False),
            logits_bias=field_of(hf, "decoder_bias", bool, default=True),
        )


def _rope(hf: Hf, kind: str, head_dim: int) -> RopeConfig:
    name, default = THETA[kind]
    theta = field_of(hf, name, float, default=default)
    return rope_of(hf, head_dim, theta=theta, section=section_of(hf, kind))


class SelfAttention(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, c.attention_bias)
        self.out_proj = RowLinear(c.hidden, c.hidden, c.attention_bias)
        self.rope = Rope(c.rope if c.windows[layer] is None else c.local_rope, c.max_len)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, window=c.window(layer))

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        q, k = self.rope(q, k, step.positions)
        return self.out_proj(self.attn(q, k, v, step.attention))


class MLP(nn.Module):
    """[T, E] -> [T, E]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(c.hidden, (c.mlp, c.mlp), c.mlp_bias)
        self.act = GatedActivation(c.act)
        self.down_proj = RowLinear(c.mlp, c.hidden, c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Layer(nn.Module):
    """The first layer has no norm before attention: the embeddings are normed."""

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.attn_norm = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias) if layer else None
        self.attn = SelfAttention(c, layer)
        self.mlp_norm = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        if self.attn_norm is None:
            normed, res = x, x
        else:
            normed, res = self.attn_norm(x, res)
        x, res = self.mlp_norm(self.attn(normed, step), res)
        return self.mlp(x), res


class PredictionHead(nn.Module):
    """What every head computes before logits: [n, E] -> [n, E]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.dense: Linear
        self.norm: LayerNorm
        if c.head == "lm":
            self.dense = Linear(c.hidden, c.hidden, c.head_bias)
            self.norm = LayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        else:
            float32 = c.head_dtype == "float32"
            self.dense = ClassifierLinear(c.hidden, c.hidden, c.head_bias, float32=float32)
            self.norm = ClassifierNorm(c.hidden, c.norm_eps, c.norm_bias, float32=float32)
        self.act = Activation(c.head_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(x)))


class Model(Decoder):
    layer_class = Layer
    weights = Weights(
        strip=("model.",),
        paths={
            "embeddings.tok_embeddings": "embed_tokens",
            "embeddings.norm": "embed_norm",
            "final_norm": "norm",
            "attn.Wqkv": "attn.qkv_proj",
            "attn.Wo": "attn.out_proj",
            "mlp.Wi": "mlp.gate_up_proj",
            "mlp.Wo": "mlp.down_proj",
            "decoder": "lm_head",
        },
        alias={"decoder.bias": "lm_bias.bias"},
        tie={"lm_head": "embed_tokens"},
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embed_norm = LayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps, c.norm_bias)
        self.head = PredictionHead(c) if c.head != "none" else None
        self.lm_bias = LogitsBias(self.lm_head) if c.head == "lm" and c.logits_bias else None

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        super().set_head(c, names)
        parts = ("head.", "lm_bias.") if c.head == "none" else ("lm_bias.",)
        self.weights = replace(self.weights, absent=(*self.weights.absent, *parts))

    def embed(self, step: StepInputs) -> Tensor:
        return self.embed_norm(super().embed(step))

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[R, E] -> [R, V] for tokens that may be masked."""
        assert self.head is not None, "built with the head"
        return self.lm_head(self.head(hidden), whole)

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32."""
        assert self.head is not None, "built with the head"
        return super().classify(self.head(pooled))
