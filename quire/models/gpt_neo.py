"""GPT-Neo: learned positions, scores that are not scaled, windows in some layers.

Source: model_type "gpt_neo", https://huggingface.co/EleutherAI/gpt-neo-1.3B; transformers
        modeling_gpt_neo.py
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.config.conventions import expand_attention_types
from quire.errors import ConfigError
from quire.models._plain import PlainAttention, PlainConfig, PlainDecoder, PlainLayer, plain_sizes
from quire.models.base import Hf, StepInputs, Weights, field_of

CONVENTIONS = {
    "windows": "attention_types",
    "mlp_kind": "plain",
    "positions_kind": "learned",
    "tied": True,
    "defaults": {
        "max_position_embeddings": 2048,
        "activation_function": "gelu_new",
        "window_size": 256,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PlainConfig):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        sizes = plain_sizes(hf)
        return cls(
            **sizes,
            qkv_bias=False,
            positions=sizes["max_len"],
            scales=(1.0,) * sizes["layers"],
            windows=_windows(hf, sizes["layers"]),
        )


def _windows(hf: Hf, layers: int) -> tuple[int | None, ...]:
    window = field_of(hf, "window_size", int)
    kinds = expand_attention_types(hf)
    if len(kinds) != layers or not {"global", "local"} >= set(kinds):
        raise ConfigError(
            f"config.json: attention_types gives {len(kinds)} layers of "
            f"{', '.join(sorted(set(kinds)))}; it must give num_layers ({layers}), each global "
            "or local"
        )
    return tuple(window if kind == "local" else None for kind in kinds)


class SelfAttention(nn.Module):
    """The level that checkpoints have between a layer and its projections."""

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.attention = PlainAttention(c, layer)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        return self.attention.forward(x, step)


class Layer(PlainLayer):
    attention_class = SelfAttention


class Model(PlainDecoder):
    layer_class = Layer
    weights = Weights(
        strip=("transformer.",),
        rename={
            "wte": "embed_tokens",
            "wpe": "embed_positions",
            "h": "layers",
            "ln_f": "norm",
            "ln_1": "norm_1",
            "ln_2": "norm_2",
        },
        fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        ignore=("*.attention.bias", "*.attention.masked_bias"),  # causal masks
        tie={"lm_head": "embed_tokens"},
    )
