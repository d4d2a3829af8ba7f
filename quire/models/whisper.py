"""Whisper: log-mel features of 30 seconds in, text with time stamps out.

The encoder always has all of its positions; the decoder has learned positions, and norms before
parts. Prompts and their tokens: quire.text.speech.

Source: model_type "whisper", https://huggingface.co/openai/whisper-large-v3; transformers
        modeling_whisper.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers import (
    ACTIVATION_KINDS,
    Activation,
    AddLayerNorm,
    ColumnLinear,
    PositionEmbedding,
    RowLinear,
    add,
)
from quire.models._encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    OwnAttention,
    SourceAttention,
)
from quire.models._whisper_encoder import EPS, ZERO_BIAS, EncoderSizes, WhisperEncoder
from quire.models.base import (
    CarriedStates,
    Hf,
    SourceInputs,
    StepInputs,
    Weights,
    dtype_of,
    field_of,
)

CONVENTIONS = {"mlp_kind": "plain", "positions_kind": "learned", "tied": True, "source": "audio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(EncoderDecoderConfig):
    encoder: EncoderSizes
    positions: int  # of the decoder

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "is_encoder_decoder", bool, default=True, one_of={True})
        field_of(hf, "scale_embedding", bool, default=False, one_of={False})
        hidden, heads = (field_of(hf, name, int) for name in ("d_model", "decoder_attention_heads"))
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"config.json: decoder_attention_heads is {heads}; it must divide d_model, {hidden}"
            )
        positions, encoder = field_of(hf, "max_target_positions", int), EncoderSizes.from_hf(hf)
        return cls(
            vocab=field_of(hf, "vocab_size", int),
            hidden=hidden,
            layers=field_of(hf, "decoder_layers", int),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            mlp=field_of(hf, "decoder_ffn_dim", int),
            max_len=positions,
            norm_eps=EPS,
            act=field_of(hf, "activation_function", str, default="gelu", one_of=ACTIVATION_KINDS),
            tied=field_of(hf, "tie_word_embeddings", bool, default=True),
            dtype=dtype_of(hf),
            encoder_layers=encoder.layers,
            encoder_heads=encoder.heads,
            encoder_mlp=encoder.mlp,
            encoder=encoder,
            positions=positions,
        )


class DecoderLayer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.self_attn = OwnAttention(c)
        self.encoder_attn_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.encoder_attn = SourceAttention(c)
        self.final_layer_norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.fc1 = ColumnLinear(c.hidden, c.mlp, bias=True)
        self.act = Activation(c.act)
        self.fc2 = RowLinear(c.mlp, c.hidden, bias=True)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> CarriedStates:
        x, res = self.self_attn_layer_norm(x, res)
        x, res = self.encoder_attn_layer_norm(self.self_attn(x, step), res)
        x, res = self.final_layer_norm(self.encoder_attn(x, step), res)
        return self.fc2(self.act(self.fc1(x))), res

    def write_source(self, hidden: Tensor, source: SourceInputs) -> None:
        """Cache what cross attention reads of the encoder's output [T, E]."""
        self.encoder_attn.write(hidden, source)


class Model(EncoderDecoder):
    layer_class = DecoderLayer
    weights = Weights(
        strip=("model.decoder.", "model."),
        rename={"proj_out": "lm_head", "layer_norm": "norm"},
        fuse={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "encoder_attn.kv_proj": ("k_proj", "v_proj"),
        },
        tie={"lm_head": "embed_tokens"},
        zero_bias=ZERO_BIAS,
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps)
        self.embed_positions = PositionEmbedding(c.positions, c.hidden)

    def build_encoder(self, c: Config) -> WhisperEncoder:
        return WhisperEncoder(c.encoder)

    def encode_source(self, source: SourceInputs) -> Tensor:
        encoder = cast(WhisperEncoder, self.encoder)
        features = [one.tensors["input_features"] for one in source.media]
        hidden: Tensor = encoder.norm(encoder.run(encoder.embed(features), source), None)[0]
        return hidden

    def embed(self, step: StepInputs) -> Tensor:
        return add(super().embed(step), self.embed_positions(step.positions))
