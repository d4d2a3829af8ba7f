"""A layer after a model's last one, in the same checkpoint, that predicts further tokens (MTP).

    x = eh_proj(cat(enorm(embedding of t[i + 1]), hnorm(h[i])))     logits of norm(layer(x))

h is the model's state after its last norm. Later passes read norm(layer(x)) in its place. Of
several such layers the first one makes all drafts.

Source: arXiv 2412.19437, section 2.2
Axes:   n tokens, E hidden
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quire.kernels.framework import lazy_fusion
from quire.layers import AddRMSNorm, Embedding, Linear, LMHead, RMSNorm
from quire.models.base import Hf, ModelConfig, StepInputs, Weights
from quire.models.drafters._base import DraftHead, HeadConfig, has_tensor, side_by_side


def read_config(hf: Hf, target: ModelConfig) -> HeadConfig:
    """Return the config of one layer like those of the target."""
    return HeadConfig(layer=replace(target, layers=1, windows=(), media=None), target=target)


class MTPHead(DraftHead):
    """Layer n of a model with n layers, under DeepSeek's names."""

    layer_class: ClassVar[Any]
    """Of the target: called with (config, layer number)."""
    weights_of: Callable[[Any], Weights]
    """Returns the target's mapping of names, from its config."""

    def __init__(self, config: HeadConfig, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights."""
        super().__init__(config)
        c, self.at = config.target, str(config.target.layers)
        layer = self.layer_class(config.layer, c.layers)
        layer.enorm, layer.hnorm = (RMSNorm(c.hidden, c.norm_eps) for _ in range(2))
        layer.eh_proj = Linear(2 * c.hidden, c.hidden)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = AddRMSNorm(c.hidden, c.norm_eps)
        layer.shared_head.head = layer.embed_tokens = None
        if has_tensor(names, f"layers.{self.at}.embed_tokens"):
            layer.embed_tokens = Embedding(c.vocab, c.hidden)
        if has_tensor(names, f"layers.{self.at}.shared_head.head"):
            layer.shared_head.head = LMHead(c.vocab, c.hidden)
        self.layers = nn.ModuleDict({self.at: layer})
        spare = range(c.layers + 1, c.layers + getattr(c, "spare_layers", 1))
        others = tuple(f"layers.{i}." for i in (*range(c.layers), *spare))
        absent = (*others, "embed_tokens.", "norm.", "lm_head.")
        self.weights = replace(type(self).weights_of(c), absent=absent)

    @property
    def own_embedding(self) -> Embedding | None:
        return cast("Embedding | None", self.layers[self.at].embed_tokens)

    @property
    def own_head(self) -> LMHead | None:
        return cast("LMHead | None", cast(Any, self.layers[self.at]).shared_head.head)

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        layer = cast(Any, self.layers[self.at])
        both = layer.enorm(embed_known(self, step)), layer.hnorm(states)
        x, res = layer(layer.eh_proj(side_by_side(*both)), None, step)
        return flushed(layer.shared_head.norm(x, res)[0])


def embed_known(head: DraftHead, step: StepInputs) -> Tensor:
    """Return the embeddings of a step's tokens [n, E]: zeros at position 0."""
    found = flushed(head.embed(step))
    return torch.where((cast(Tensor, step.positions) > 0)[:, None], found, 0)


def flushed(x: Tensor) -> Tensor:
    """Return a tensor that torch may read."""
    lazy_fusion.flush()
    return x
