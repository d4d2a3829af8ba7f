"""GPT-J: rotary positions of neighbouring pairs on a part of each head, attention beside the MLP.

Source: model_type "gptj", https://huggingface.co/EleutherAI/gpt-j-6b; transformers modeling_gptj.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layers import RopeConfig
from quire.layers.rope_scaling import UnscaledRope
from quire.models._plain import PlainConfig, PlainDecoder, plain_sizes
from quire.models.base import Hf, Weights, field_of

THETA = 10000.0

CONVENTIONS = {
    "mlp_kind": "plain",
    "defaults": {"n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "tie_word_embeddings", bool, default=False, one_of={False})
        sizes = plain_sizes(hf, tied=False)
        dims = field_of(hf, "rotary_dim", int)
        if dims % 2 or not 0 < dims <= sizes["head_dim"]:
            raise ConfigError(
                f"config.json: rotary_dim is {dims}; it must be an even number of the "
                f"{sizes['head_dim']} channels of a head"
            )
        return cls(
            **sizes,
            qkv_bias=False,
            out_bias=False,
            head_bias=True,
            parallel=True,
            norms=1,
            rope=RopeConfig(THETA, dims, UnscaledRope()),
            interleaved=True,
        )


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "wte": "embed_tokens",
            "h": "layers",
            "ln_f": "norm",
            "ln_1": "norm_1",
            "fc_in": "c_fc",
            "fc_out": "c_proj",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.attn.bias", "*.attn.masked_bias"),
    )
