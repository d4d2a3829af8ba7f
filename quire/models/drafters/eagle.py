"""EAGLE 1 and 2: layers over the next token's embedding and the target's last state.

    x = fc(cat(embedding of t[i + 1], h[i]))        h[i + 1] = layers(x)        logits of h

The first layer has no norm before its attention, and there is none after the last.

Source: arXiv 2401.15077, https://github.com/SafeAILab/EAGLE
Axes:   n tokens, E hidden
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddRMSNorm, Embedding, Linear, LMHead, add
from quire.models import llama
from quire.models._decoder import GatedMLP, select_rows
from quire.models.base import Hf, ModelConfig, StepInputs
from quire.models.drafters._base import (
    DraftHead,
    HeadConfig,
    has_tensor,
    read_layer_config,
    side_by_side,
)


def read_config(hf: Hf, target: ModelConfig) -> HeadConfig:
    """Read config.json, or the `model` that it may have. Raises ConfigError."""
    inner = hf.get("model")
    own = {**hf, **(inner if isinstance(inner, Mapping) else {})}
    return HeadConfig(layer=read_layer_config(own, target), target=target)


class FirstLayer(nn.Module):
    """A layer whose attention reads its input as it is."""

    def __init__(self, c: llama.Config) -> None:
        super().__init__()
        self.self_attn = llama.SelfAttention(c, c.window(0))
        self.post_attention_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c.hidden, c.mlp, c.act, c.mlp_bias)

    def forward(
        self, x: Tensor, res: Tensor | None, step: StepInputs, needed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [n, E] -> what the layer adds to the residual, and the residual. needed: as for
        quire.models._decoder.PreNormLayer."""
        more = self.self_attn(x, step)
        if needed is not None:
            more, x = select_rows(more, x, needed)
        normed, res = self.post_attention_layernorm(more, x)
        return self.mlp(normed), res


class Head(DraftHead):
    selects_rows = True
    weights = replace(llama.Model.weights, ignore=("*.rotary_emb.inv_freq", "embed_scale"))

    def __init__(self, config: HeadConfig, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights."""
        super().__init__(config)
        c = cast(llama.Config, config.layer)
        self.fc = Linear(2 * c.hidden, c.hidden, bias="fc.bias" in names)
        normed = has_tensor(names, "layers.0.input_layernorm")
        first = llama.Layer(c, 0) if normed else FirstLayer(c)
        self.layers = nn.ModuleList([first, *(llama.Layer(c, i) for i in range(1, c.layers))])
        if has_tensor(names, "embed_tokens"):
            self.embed_tokens = Embedding(c.vocab, c.hidden)
        if has_tensor(names, "lm_head"):
            self.lm_head = LMHead(c.vocab, c.hidden)

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        x: Tensor = self.fc(side_by_side(self.embed(step), states))
        res: Tensor | None = None
        for layer in self.layers:
            x, res = layer(x, res, step, step.needed if layer is self.layers[-1] else None)
        assert res is not None
        out = add(x, res)
        lazy_fusion.flush()  # it is read by torch
        return out
