"""OLMo-2: norms after attention and MLP, and a norm over all heads of the queries and of the keys.

Source: model_type "olmo2", https://huggingface.co/allenai/OLMo-2-1124-7B; transformers
        modeling_olmo2.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quire.layers import AllHeadsRMSNorm, RMSNorm, add
from quire.models import llama
from quire.models._decoder import GatedMLP
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of

CONVENTIONS = {"defaults": {"rms_norm_eps": 1e-5}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        bias = field_of(hf, "attention_bias", bool, default=False)
        return cls(**rotary_sizes_of(hf), qkv_bias=bias, o_bias=bias)


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: llama.Config, layer: int) -> None:
        super().__init__(c, c.window(layer))
        self.q_norm = AllHeadsRMSNorm(c.heads, c.head_dim, c.norm_eps, c.kv_heads)
        self.k_norm = AllHeadsRMSNorm(c.kv_heads, c.head_dim, c.norm_eps)


class Layer(nn.Module):
    """A layer with a norm after each half. OLMo-3 replaces the attention."""

    attention_class: ClassVar[Any] = SelfAttention

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x = x if res is None else add(x, res)
        res = add(x, self.post_attention_layernorm(self.self_attn(x, step)))
        return self.post_feedforward_layernorm(self.mlp(res)), res


class Model(llama.Model):
    layer_class = Layer
