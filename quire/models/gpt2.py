"""GPT-2: learned positions, q, k, v in one tensor. Checkpoints store linear weights transposed.

Source: model_type "gpt2", https://huggingface.co/openai-community/gpt2; transformers
        modeling_gpt2.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.models._plain import PlainConfig, PlainDecoder, plain_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "defaults": {"activation_function": "gelu_new"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        field_of(hf, "add_cross_attention", bool, default=False, one_of={False})
        sizes = plain_sizes(hf)
        return cls(
            **sizes,
            positions=sizes["max_len"],
            scales=_scales(hf, sizes["head_dim"], sizes["layers"]),
        )


def _scales(hf: Hf, head_dim: int, layers: int) -> tuple[float, ...]:
    scaled = field_of(hf, "scale_attn_weights", bool, default=True)
    by_layer = field_of(hf, "scale_attn_by_inverse_layer_idx", bool, default=False)
    scale = head_dim**-0.5 if scaled else 1.0
    return tuple(scale / (i + 1) if by_layer else scale for i in range(layers))


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "wte": "embed_tokens",
            "wpe": "embed_positions",
            "h": "layers",
            "ln_f": "norm",
            "ln_1": "norm_1",
            "ln_2": "norm_2",
            "c_attn": "qkv_proj",
            "attn.c_proj": "out_proj",
        },
        transpose=("qkv_proj", "out_proj", "c_fc", "c_proj"),
        ignore=("*.attn.bias", "*.attn.masked_bias"),  # causal masks
        tie={"lm_head": "embed_tokens"},
    )
