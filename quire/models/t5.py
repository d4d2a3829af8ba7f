"""T5: RMSNorm before each part, a bias of scores by distance instead of positions, unscaled scores.

FLAN-T5 and T5 1.1 have a gated MLP and a head of their own. The first layer's bias is that of the
whole stack; cross attention has none.

Source: model_type "t5", https://huggingface.co/google-t5/t5-small; transformers modeling_t5.py
Axes:   T tokens in the step or of all sources, E hidden, F mlp width, H heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddRMSNorm,
    Attention,
    ColumnLinear,
    CrossAttention,
    EncoderAttention,
    GatedActivation,
    KVLinear,
    QKVLinear,
    QueryLinear,
    RelativeBias,
    RowLinear,
)
from quire.models._encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from quire.models.base import (
    CarriedStates,
    Hf,
    ModelConfig,
    SourceInputs,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "relative",
    "tied": True,
    "fits_float16": False,
    "nested_defaults": {
        "is_encoder_decoder": True,
        "vocab_size": 32_128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "decoder_start_token_id": 0,
    },
}
DEFAULT_LEN = 512
"""Decoder tokens to serve, if config.json has no n_positions: the model itself has no limit."""
SCALE = 1.0
"""Of scores: the projections were trained without a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(EncoderDecoderConfig):
    gated: bool
    buckets: int  # of distances
    max_distance: int

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "is_encoder_decoder", bool, default=False, one_of={True})
        hidden, heads, layers, mlp = (
            field_of(hf, name, int) for name in ("d_model", "num_heads", "num_layers", "d_ff")
        )
        projection = field_of(hf, "feed_forward_proj", str, default="relu")
        act = projection.removeprefix("gated-")
        field_of({"feed_forward_proj": act}, "feed_forward_proj", str, one_of=ACTIVATION_KINDS)
        tied = field_of(hf, "tie_word_embeddings", bool, default=True)
        scaled = field_of(hf, "scale_decoder_outputs", bool, default=tied)
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=field_of(hf, "num_decoder_layers", int, default=layers),
            heads=heads,
            kv_heads=heads,
            head_dim=field_of(hf, "d_kv", int, default=hidden // heads),
            mlp=mlp,
            max_len=field_of(hf, "n_positions", int, default=DEFAULT_LEN),
            norm_eps=field_of(hf, "layer_norm_epsilon", float, default=1e-6),
            act="gelu_new" if projection == "gated-gelu" else act,
            tied=True,  # unless the checkpoint has a head
            dtype=dtype_of(hf),
            logit_scale=hidden**-0.5 if scaled else 1.0,
            encoder_layers=layers,
            encoder_heads=heads,
            encoder_mlp=mlp,
            gated=projection != act,
            buckets=field_of(hf, "relative_attention_num_buckets", int, default=32),
            max_distance=field_of(hf, "relative_attention_max_distance", int, default=128),
        )


def _bias(c: Config, *, bidirectional: bool) -> RelativeBias:
    return RelativeBias(c.buckets, c.max_distance, c.heads, bidirectional=bidirectional)


class EncoderSelfAttention(nn.Module):
    """relative: of the stack; the first layer owns it."""

    def __init__(self, c: Config, relative: RelativeBias | None) -> None:
        super().__init__()
        self.qkv = QKVLinear(c.hidden, c.heads, c.heads, c.head_dim)
        self.o = RowLinear(c.heads * c.head_dim, c.hidden)
        if relative is None:
            self.relative_attention_bias = relative = _bias(c, bidirectional=True)
        self.attn = EncoderAttention(c.head_dim, scale=SCALE, relative=relative)

    def forward(self, x: Tensor, source: SourceInputs) -> Tensor:
        q, k, v = self.qkv(x)
        return self.o(self.attn(q, k, v, source.starts, source.longest))


class DecoderSelfAttention(nn.Module):
    """relative: of the stack; the first layer owns it."""

    def __init__(self, c: Config, relative: RelativeBias | None) -> None:
        super().__init__()
        self.qkv = QKVLinear(c.hidden, c.heads, c.heads, c.head_dim)
        self.o = RowLinear(c.heads * c.head_dim, c.hidden)
        if relative is None:
            self.relative_attention_bias = relative = _bias(c, bidirectional=False)
        self.attn = Attention(c.heads, c.heads, c.head_dim, scale=SCALE, relative=relative)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        q, k, v = self.qkv(x)
        return self.o(self.attn(q, k, v, step.attention))


class EncDecAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.q = QueryLinear(c.hidden, c.heads, c.head_dim)
        self.kv = KVLinear(c.hidden, c.heads, c.head_dim)
        self.o = RowLinear(c.heads * c.head_dim, c.hidden)
        self.attn = CrossAttention(c.heads, c.heads, c.head_dim, scale=SCALE)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        (q,) = self.q(x)
        return self.o(self.attn(q, step.attention))

    def write(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache keys and values of the encoder's output [T, E]."""
        k, v = self.kv(hidden)
        self.attn.write(k, v, source.slots, source.attention)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.wi = ColumnLinear(c.hidden, (c.mlp, c.mlp) if c.gated else c.mlp)
        self.act = GatedActivation(c.act) if c.gated else Activation(c.act)
        self.wo = RowLinear(c.mlp, c.hidden)

    def forward(self, x: Tensor, _: object) -> Tensor:
        return self.wo(self.act(self.wi(x)))  # [T, E] -> [T, F] or [T, 2F] -> [T, F] -> [T, E]


class Part(nn.Module):
    """One of a block's parts, and the norm before it. name: of the part in checkpoints."""

    def __init__(self, c: Config, name: str, part: nn.Module) -> None:
        super().__init__()
        self.layer_norm = AddRMSNorm(c.hidden, c.norm_eps)
        self.name = name
        self.add_module(name, part)

    def forward(
        self, x: Tensor, res: Tensor | None, inputs: StepInputs | SourceInputs
    ) -> tuple[Tensor, Tensor]:
        x, res = self.layer_norm(x, res)
        return self._modules[self.name](x, inputs), res  # type: ignore[misc]  # it is a module


class Block(nn.Module):
    """Parts in order, as `layer` of checkpoints."""

    def __init__(self, c: Config, *parts: tuple[str, nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Part(c, name, part) for name, part in parts)

    def forward(
        self, x: Tensor, res: Tensor | None, inputs: StepInputs | SourceInputs
    ) -> CarriedStates:
        for part in self.layer:
            x, res = part(x, res, inputs)
        return x, res


class DecoderBlock(Block):
    def __init__(self, c: Config, own: DecoderSelfAttention) -> None:
        cross = EncDecAttention(c)
        super().__init__(
            c, ("SelfAttention", own), ("EncDecAttention", cross), ("DenseReluDense", MLP(c))
        )
        self.__dict__["cross"] = cross  # it is in `layer`

    def write_source(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache what cross attention reads of the encoder's output [T, E]."""
        cross: EncDecAttention = self.__dict__["cross"]
        cross.write(hidden, source)


class EncoderStack(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        first = EncoderSelfAttention(c, None)
        bias = first.relative_attention_bias
        rest = [EncoderSelfAttention(c, bias) for _ in range(c.encoder_layers - 1)]
        self.layers = nn.ModuleList(
            Block(c, ("SelfAttention", own), ("DenseReluDense", MLP(c))) for own in (first, *rest)
        )
        self.norm = AddRMSNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, source: SourceInputs) -> Tensor:
        """x [T, E] of packed sources -> [T, E]."""
        res = None
        for layer in self.layers:
            x, res = layer(x, res, source)
        return self.norm(x, res)[0]


class Model(EncoderDecoder):
    weights = Weights(
        strip=("decoder.",),
        rename={"shared": "embed_tokens", "block": "layers", "final_layer_norm": "norm"},
        fuse={
            "qkv": ("q", "k", "v"),
            "EncDecAttention.kv": ("k", "v"),
            "DenseReluDense.wi": ("wi_0", "wi_1"),
        },
        ignore=("*encoder.embed_tokens.weight", "*decoder.embed_tokens.weight",
                "*.EncDecAttention.relative_attention_bias.weight"),
        tie={"lm_head": "embed_tokens"},
        tie_if_missing=True,
    )  # fmt: skip

    def build_encoder(self, c: Config) -> nn.Module:
        return EncoderStack(c)

    def build_layers(self, c: ModelConfig) -> nn.ModuleList:
        assert isinstance(c, Config)
        first = DecoderSelfAttention(c, None)
        bias = first.relative_attention_bias
        rest = [DecoderSelfAttention(c, bias) for _ in range(c.layers - 1)]
        return nn.ModuleList(DecoderBlock(c, own) for own in (first, *rest))
