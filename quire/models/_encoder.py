"""Encoder skeleton: whole sequences, packed, whose tokens see each other in both directions.

A model file gives the names in the checkpoint; the embeddings, the usual layer (norms after each
part) and the heads are here. There is no cache: a step has every token of its sequences.

Axes: T tokens in the step, n pooled states, R rows with logits, E hidden, W size of a token's
vector, F mlp width, H heads, D head size, V vocab
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    Attention,
    ClassifierLinear,
    ColumnLinear,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    LogitsBias,
    PositionTypeEmbedding,
    QKVLinear,
    RelativeBias,
    RowLinear,
    softcap,
)
from quire.models._decoder import Decoder
from quire.models.base import (
    CarriedStates,
    Hf,
    ModelConfig,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Config of encoders with learned positions."""

    word_size: int  # of a token's vector, before projection to hidden
    positions: int  # used rows of the position table
    skip: int = 0  # rows before them
    types: tuple[int, ...] = ()  # rows of each table of types; tokens have a type of the first


def encoder_sizes(
    hf: Hf,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    mlp: str = "intermediate_size",
    act: str = "hidden_act",
    word_size: str | None = None,
    eps: float = 1e-12,
    default_act: str = "gelu",
    offset: bool = False,
) -> dict[str, Any]:
    """Fields of EncoderConfig; arguments name the fields of config.json.

    eps, default_act: if config.json has none. offset: positions start after the padding token's.
    """
    field_of(hf, "is_decoder", bool, default=False, one_of={False})
    field_of(hf, "position_embedding_type", str, default="absolute", one_of={"absolute"})
    width, count = field_of(hf, hidden, int), field_of(hf, heads, int)
    if count < 1 or width % count:
        raise ConfigError(f"config.json: {heads} is {count}; it must divide {hidden}, {width}")
    skip = field_of(hf, "pad_token_id", int, default=1) + 1 if offset else 0
    positions = field_of(hf, "max_position_embeddings", int, default=512) - skip
    return {
        "vocab": field_of(hf, "vocab_size", int),
        "hidden": width,
        "layers": field_of(hf, layers, int),
        "heads": count,
        "kv_heads": count,
        "head_dim": width // count,
        "mlp": field_of(hf, mlp, int),
        "max_len": positions,
        "norm_eps": field_of(hf, "layer_norm_eps", float, default=eps),
        "act": field_of(hf, act, str, default=default_act, one_of=ACTIVATION_KINDS),
        "tied": field_of(hf, "tie_word_embeddings", bool, default=True),
        "dtype": dtype_of(hf),
        "bidirectional": True,
        "word_size": width if word_size is None else field_of(hf, word_size, int, default=width),
        "positions": positions,
        "skip": skip,
    }


class BidirectionalSelfAttention(nn.Module):
    def __init__(self, c: ModelConfig, relative: RelativeBias | None = None) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(c.hidden, c.heads, c.kv_heads, c.head_dim, bias=True)
        self.out_proj = RowLinear(c.heads * c.head_dim, c.hidden, bias=True)
        self.attn = Attention(c.heads, c.kv_heads, c.head_dim, relative=relative)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv_proj(x)  # each [T, H, D]
        return self.out_proj(self.attn(q, k, v, step.attention))


class EncoderLayer(nn.Module):
    """Attention and an MLP without a gate; after each, a norm of the sum with its input."""

    def __init__(self, c: ModelConfig, layer: int, relative: RelativeBias | None = None) -> None:
        super().__init__()
        self.self_attn: nn.Module = BidirectionalSelfAttention(c, relative)
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden, c.mlp, bias=True)
        self.act = Activation(c.act)
        self.fc2 = RowLinear(c.mlp, c.hidden, bias=True)
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, _ = self.self_attn_layer_norm(self.self_attn(x, step), x)
        mlp = self.fc2(self.act(self.fc1(x)))  # [T, E] -> [T, F] -> [T, E]
        return self.final_layer_norm(mlp, x)[0], None


class ClassificationHead(nn.Module):
    """Pooled states [n, E] to logits of labels. act: of a layer before them; None: there is none"""

    def __init__(self, c: ModelConfig, act: str | None) -> None:
        super().__init__()
        float32 = c.head_dtype == "float32"
        self.dense: nn.Module | None = None
        if act is not None:
            self.dense = ClassifierLinear(c.hidden, c.hidden, bias=True, float32=float32)
            self.act = None if act == "tanh" else Activation(act)
        self.out_proj = ClassifierLinear(c.hidden, c.labels, bias=True, float32=float32)

    def forward(self, pooled: Tensor) -> Tensor:
        if self.dense is not None:
            pooled = self.dense(pooled)
            pooled = softcap(pooled, 1.0) if self.act is None else self.act(pooled)  # 1.0: tanh
        return self.out_proj(pooled)


class LMTransform(nn.Module):
    """What masked language models compute before the output head: [R, E] -> [R, W]."""

    def __init__(self, inputs: int, outputs: int, act: str, eps: float) -> None:
        super().__init__()
        self.dense = Linear(inputs, outputs, bias=True)
        self.act = Activation(act)
        self.norm = LayerNorm(outputs, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(x)))


HEADS = (
    *("head.", "head.dense.", "lm_transform.", "lm_head.", "lm_bias.", "pooler.", "classifier."),
    "linear.",  # ColBERT's, of the pooler
)
"""Prefixes of the modules of heads. A model has one head; a checkpoint may have others."""
TOKEN_HEAD = {"classifier": "head.out_proj"}
"""What checkpoints call the head that classifies tokens."""


class Encoder(Decoder):
    """Base of encoders with learned positions. Hidden states are those after the last layer."""

    layer_class: ClassVar[Any] = EncoderLayer
    head_act: ClassVar[str] = "tanh"  # of the head that classifies sequences
    lm_act: ClassVar[str | None] = None  # of the head of masked tokens; None: as in the layers

    def __init__(self, c: EncoderConfig) -> None:
        nn.Module.__init__(self)
        self.norm = None
        self.embed_tokens = Embedding(c.vocab, c.word_size)
        self.embed_positions = self.build_positions(c)
        self.embed_norm = AddLayerNorm(c.word_size, c.norm_eps)
        projected = c.word_size != c.hidden
        self.project_in = Linear(c.word_size, c.hidden, bias=True) if projected else None
        self.layers = self.build_layers(c)
        if c.head == "lm":
            self.lm_transform = LMTransform(c.hidden, c.word_size, self.lm_act or c.act, c.norm_eps)
            self.lm_head = LMHead(c.vocab, c.word_size)
            self.lm_bias = LogitsBias(self.lm_head)
        elif c.head != "none":
            self.head = ClassificationHead(c, self.head_act if c.head == "classify" else None)
        own = {f"{name}." for name, _ in self.named_modules()}
        weights: Weights = self.weights
        self.weights = replace(
            weights,
            paths={**weights.paths, **(TOKEN_HEAD if c.head == "token_classify" else {})},
            absent=tuple(prefix for prefix in HEADS if prefix not in own),
            tie=weights.tie if c.head == "lm" else {},
        )

    def build_positions(self, c: EncoderConfig) -> nn.Module | None:
        """What is added to the vectors of tokens: called with positions and types."""
        return PositionTypeEmbedding(c.positions, c.word_size, c.types, c.skip)

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        """The head was built with the rest. Raises ConfigError for one made of token logits."""
        if c.label_tokens is not None:
            raise ConfigError(
                "classifier_from_token needs a model that generates tokens, and this one is an "
                "encoder; leave it out: its checkpoint must have a head that classifies"
            )

    def embed(self, step: StepInputs) -> Tensor:
        words = step.inputs_embeds
        if words is None:
            words = self.embed_tokens(step.token_ids)
        places = None
        if self.embed_positions is not None:
            places = self.embed_positions(step.positions, step.token_types)
        x, _ = self.embed_norm(words, places)
        return x if self.project_in is None else self.project_in(x)

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        return x

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[R, E] -> [R, V] for tokens that may be masked."""
        return self.lm_head(self.lm_transform(hidden), whole)

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of labels: [n, E] float32 -> [n, labels] float32."""
        logits = self.head(pooled)
        lazy_fusion.flush()
        return logits
