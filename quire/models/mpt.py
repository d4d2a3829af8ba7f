"""MPT: ALiBi, or learned positions; norms and linear layers without biases; clipped q, k, v.

Source: model_type "mpt", https://huggingface.co/mosaicml/mpt-7b (its code has the biases, the
        learned positions and the scale of logits, which transformers leaves out); transformers
        modeling_mpt.py
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.models._plain import PlainConfig, PlainDecoder, alibi_slopes, plain_sizes
from quire.models.base import Hf, Weights, field_of

CONVENTIONS = {
    "mlp_kind": "plain",
    "positions_kind": "alibi",
    "tied": True,
    "defaults": {"max_seq_len": 2048, "expansion_ratio": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        norms = {"low_precision_layernorm", "layernorm"}
        field_of(hf, "norm_type", str, default="low_precision_layernorm", one_of=norms)
        attention = field_of(hf, "attn_config", dict, default={})
        whole = "multihead_attention"
        field_of(attention, "attn_type", str, default=whole, one_of={whole})
        for feature in ("prefix_lm", "qk_ln"):
            field_of(attention, feature, bool, default=False, one_of={False})
        wider = field_of(hf, "expansion_ratio", int)
        width = wider * field_of(hf, "d_model", int)
        sizes = plain_sizes({**hf, "intermediate_size": width, "hidden_act": "gelu"})
        if field_of(attention, "alibi", bool, default=True):
            steepest = field_of(attention, "alibi_bias_max", int, default=8)
            sizes["alibi"] = alibi_slopes(sizes["heads"], steepest)
        else:
            sizes["positions"] = sizes["max_len"]
        bias = not field_of(hf, "no_bias", bool, default=True)
        scale = field_of(attention, "softmax_scale", float, default=None)
        return cls(
            **sizes,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            norm_bias=bias,
            scales=() if scale is None else (scale,) * sizes["layers"],
            qkv_limit=field_of(attention, "clip_qkv", float, default=None) or None,
            logit_scale=_logit_scale(hf, sizes["hidden"]),
        )


def _logit_scale(hf: Hf, hidden: int) -> float:
    if hf.get("logit_scale") == "inv_sqrt_d_model":
        return float(hidden) ** -0.5
    scale = field_of(hf, "logit_scale", float, default=1.0)
    if scale == 0.0:
        raise ConfigError("config.json: logit_scale is 0.0, which makes all tokens alike")
    return scale


class Model(PlainDecoder):
    weights = Weights(
        strip=("transformer.",),
        rename={
            "wte": "embed_tokens",
            "wpe": "embed_positions",
            "blocks": "layers",
            "norm_f": "norm",
            "Wqkv": "qkv_proj",
            "ffn": "mlp",
            "up_proj": "c_fc",
            "down_proj": "c_proj",
        },
        tie={"lm_head": "embed_tokens"},
    )
