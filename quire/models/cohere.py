"""Command R: attention and MLP beside each other on one LayerNorm; neighbouring rotary pairs.

Command R+ norms every query and key head, with weights of its own. Logits have a factor.

Source: model_type "cohere", https://huggingface.co/CohereLabs/c4ai-command-r-v01; transformers
        modeling_cohere.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.layers import AddLayerNorm, HeadLayerNorm, add
from quire.models import llama
from quire.models._decoder import GatedMLP
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of

CONVENTIONS = {"tied": True, "defaults": {"rope_theta": 500_000.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        return cls(**shared_fields(hf), qk_norm=field_of(hf, "use_qk_norm", bool, default=False))


def shared_fields(hf: Hf) -> dict[str, Any]:
    """Read the fields that Command R and R7B have in common."""
    bias = field_of(hf, "attention_bias", bool, default=False)
    return {
        **rotary_sizes_of(hf, tied=True),
        "norm_eps": field_of(hf, "layer_norm_eps", float, default=1e-5),
        "logit_scale": field_of(hf, "logit_scale", float, default=0.0625),
        "interleaved": True,
        "qkv_bias": bias,
        "o_bias": bias,
    }


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, c.window(layer))
        if c.qk_norm:
            self.q_norm = HeadLayerNorm(c.heads, c.head_dim, c.norm_eps, c.kv_heads)
            self.k_norm = HeadLayerNorm(c.kv_heads, c.head_dim, c.norm_eps)


class Layer(nn.Module):
    """Attention and MLP on one norm. Command R7B replaces the attention."""

    attention_class: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddLayerNorm(c.hidden, c.norm_eps, bias=False)
        self.self_attn = self.attention_class(c, layer)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        return add(self.self_attn(x, step), self.mlp(x)), res


class Model(llama.Model):
    layer_class = Layer

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps, bias=False)
