"""StableLM: Llama with LayerNorm, a part of each head rotated, and, in the 12B, norms of heads.

The 12B also has attention and MLP beside each other, on one norm.

Source: model_type "stablelm", https://huggingface.co/stabilityai/stablelm-2-12b; transformers
        modeling_stablelm.py
Axes:   T tokens in the step, E hidden
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quire.layers import AddLayerNorm, HeadLayerNorm, add
from quire.models import llama
from quire.models._decoder import GatedMLP
from quire.models._rope import rotary_sizes_of
from quire.models.base import Hf, StepInputs, field_of

CONVENTIONS = {"defaults": {"partial_rotary_factor": 0.25}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(llama.Config):
    parallel: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: Hf) -> Config:
        eps = field_of(hf, "layer_norm_eps", float, default=1e-5)
        return cls(
            **{**rotary_sizes_of({**hf, "head_dim": None}), "norm_eps": eps},
            qkv_bias=field_of(hf, "use_qkv_bias", bool, default=False),
            parallel=field_of(hf, "use_parallel_residual", bool, default=False),
            qk_norm=field_of(hf, "qk_layernorm", bool, default=False),
        )


class SelfAttention(llama.SelfAttention):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__(c, c.window(layer))
        if c.qk_norm:
            self.q_norm = HeadLayerNorm(c.heads, c.head_dim, c.norm_eps, c.kv_heads)
            self.k_norm = HeadLayerNorm(c.kv_heads, c.head_dim, c.norm_eps)


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = AddLayerNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, layer)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act)
        self.post_attention_layernorm: nn.Module | None = None
        if not c.parallel:
            self.post_attention_layernorm = AddLayerNorm(c.hidden, c.norm_eps)

    def forward(self, x: Tensor, res: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        x, res = self.input_layernorm(x, res)
        attended = self.self_attn(x, step)
        if self.post_attention_layernorm is None:
            return add(attended, self.mlp(x)), res
        x, res = self.post_attention_layernorm(attended, res)
        return self.mlp(x), res


class Model(llama.Model):
    layer_class = Layer
    weights = replace(
        llama.Model.weights,
        rename={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        heads=("norms",),
    )

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.norm = AddLayerNorm(c.hidden, c.norm_eps)
