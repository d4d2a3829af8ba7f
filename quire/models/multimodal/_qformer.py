"""Q-Former of BLIP-2: learned queries attend to each other, and in some layers to an image.

    x = norm(x + attn(x, x));  x = norm(x + attn(x, states));  x = norm(x + mlp(x))

Source: transformers modeling_blip_2.py
Axes:   N images, Q queries of each, n states of an image, E hidden, S numbers of a state, H heads
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import ACTIVATION_KINDS, Activation, AddLayerNorm, LayerNorm, Linear
from quire.models.base import Hf, field_of
from quire.models.multimodal._vit import Learned

QFORMER_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408,
}
"""What a Q-Former's section leaves out."""
QFORMER_NAMES = {
    "qformer.encoder.layer": "qformer.layers",
    "attention.attention": "attention",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention.norm",
    "crossattention.attention": "crossattention",
    "crossattention.output.dense": "crossattention.dense",
    "crossattention.output.LayerNorm": "crossattention.norm",
    "intermediate_query.dense": "fc1",
    "output_query.dense": "fc2",
    "output_query.LayerNorm": "norm",
}
"""Paths in checkpoints -> ours, of a module `qformer`."""


class QueryAttention(nn.Module):
    """Attention to states of `width` numbers, and the norm of its sum with the input."""

    def __init__(self, hidden: int, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(hidden, hidden, bias=True)
        self.key = Linear(width, hidden, bias=True)
        self.value = Linear(width, hidden, bias=True)
        self.dense = Linear(hidden, hidden, bias=True)
        self.norm = AddLayerNorm(hidden, eps)

    def forward(self, x: Tensor, states: Tensor, count: int) -> Tensor:
        """x [N * Q, E], states [N * n, S] of N = count images -> [N * Q, E]."""
        parts = self.query(x), self.key(states), self.value(states)
        lazy_fusion.flush()
        q, k, v = (
            one.view(count, len(one) // count, self.heads, -1).transpose(1, 2) for one in parts
        )
        found = scaled_dot_product_attention(q, k, v)
        merged = found.transpose(1, 2).reshape(x.shape)
        y: Tensor = self.norm(self.dense(merged), x)[0]
        return y


class QFormerLayer(nn.Module):
    def __init__(self, hf: Hf, layer: int) -> None:
        super().__init__()
        hidden, mlp = field_of(hf, "hidden_size", int), field_of(hf, "intermediate_size", int)
        heads = field_of(hf, "num_attention_heads", int)
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"config.json: num_attention_heads of the Q-Former is {heads}; it must divide "
                f"hidden_size, {hidden}"
            )
        eps = field_of(hf, "layer_norm_eps", float)
        self.attention = QueryAttention(hidden, hidden, heads, eps)
        self.crossattention: QueryAttention | None = None
        if layer % field_of(hf, "cross_attention_frequency", int) == 0:
            width = field_of(hf, "encoder_hidden_size", int)
            self.crossattention = QueryAttention(hidden, width, heads, eps)
        self.fc1 = Linear(hidden, mlp, bias=True)
        self.act = Activation(field_of(hf, "hidden_act", str, one_of=ACTIVATION_KINDS))
        self.fc2 = Linear(mlp, hidden, bias=True)
        self.norm = AddLayerNorm(hidden, eps)

    def forward(self, x: Tensor, states: Tensor, count: int) -> Tensor:
        x = self.attention(x, x, count)
        if self.crossattention is not None:
            x = self.crossattention(x, states, count)
        y: Tensor = self.norm(self.fc2(self.act(self.fc1(x))), x)[0]
        return y


class QFormer(nn.Module):
    def __init__(self, hf: Hf, queries: int) -> None:
        """hf: the section of a config.json."""
        super().__init__()
        hf = {**QFORMER_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
        field_of(hf, "use_qformer_text_input", bool, default=False, one_of={False})
        self.hidden = field_of(hf, "hidden_size", int)
        self.queries = Learned(queries, self.hidden)
        self.layernorm = LayerNorm(self.hidden, field_of(hf, "layer_norm_eps", float))
        self.layers = nn.ModuleList(
            QFormerLayer(hf, i) for i in range(field_of(hf, "num_hidden_layers", int))
        )

    def forward(self, states: Tensor) -> Tensor:
        """States of images [N, n, S] -> [N * Q, E]."""
        count = len(states)
        table: Tensor = self.queries.weight
        x = self.layernorm(table.repeat(count, 1))
        flat = states.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, flat, count)
        return x
