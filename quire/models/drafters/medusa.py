"""Medusa: heads that read the target's last state, each for a token further ahead.

    x = x + silu(linear(x)), a few times        logits of head i: of token 2 + i behind the state

Source: arXiv 2401.10774, https://github.com/FasterDecoding/Medusa
Axes:   m rows, E hidden
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.kernels.argmax import argmax
from quire.kernels.framework import lazy_fusion
from quire.layers import Activation, Linear, LMHead, add
from quire.models.base import Hf, ModelConfig, Weights, field_of
from quire.models.drafters._base import DraftHead, HeadConfig, check_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HeadConfig):
    heads: int
    depth: int  # residual layers of a head


def read_config(hf: Hf, target: ModelConfig) -> Config:
    """Read config.json under Medusa's names, or those of converted folders. Raises ConfigError."""
    for key in ("truncated_vocab_size", "original_lm_head"):
        if hf.get(key) not in (None, False, target.vocab):
            raise ConfigError(
                f"config.json: {key} is {hf[key]}; Medusa heads need an output head each, over the "
                f"{target.vocab} tokens of the model"
            )
    own = field_of(hf, "hidden_size", int, default=target.hidden)
    heads = field_of(hf, "num_heads", int, default=5)
    depth = field_of(hf, "num_hidden_layers", int, default=1)
    return Config(
        layer=replace(target, layers=0, hidden=own, windows=(), media=None),
        target=target,
        heads=field_of(hf, "medusa_num_heads", int, default=heads),
        depth=field_of(hf, "medusa_num_layers", int, default=depth),
    )


class _Block(nn.Module):
    """The residual layers of one head."""

    def __init__(self, size: int, depth: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size, bias) for _ in range(depth))
        self.act = Activation("silu")

    def forward(self, x: Tensor) -> Tensor:
        """[m, E] -> [m, E]."""
        for layer in self.layers:
            x = add(x, self.act(layer(x)))
        return x


class Head(DraftHead):
    """All heads."""

    def __init__(self, config: Config, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights. Their number of heads counts:
        some config.json files state another."""
        super().__init__(config)
        size, depth = config.layer.hidden, config.depth
        self.depth = depth
        numbers = [re.match(r"(?:medusa_head\.|blocks\.|lm_heads\.)?(\d+)\.", one) for one in names]
        heads = 1 + max((int(one[1]) for one in numbers if one), default=config.heads - 1)
        bias = not names or any(re.search(r"(layers\.\d+|linear)\.bias$", one) for one in names)
        self.blocks = nn.ModuleList(_Block(size, depth, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(LMHead(config.target.vocab, size) for _ in range(heads))
        alias = {}
        for prefix in ("", "medusa_head."):
            for i in range(heads):
                alias[f"{prefix}{i}.{depth}.weight"] = f"lm_heads.{i}.weight"
                for j in range(depth):
                    for param in ("weight", "bias"):
                        name = f"{prefix}{i}.{j}.linear.{param}"
                        alias[name] = f"blocks.{i}.layers.{j}.{param}"
        self.weights = Weights(alias=alias)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        own, given = self.config.layer.hidden, self.config.target.hidden
        if own != given:
            raise ConfigError(
                f"speculative_config: the heads read {own} hidden numbers, and the model has "
                f"{given}: they were made for another model"
            )
        check_size(shapes, "linear.weight", 0, self.config.layer.hidden)
        for i in range(len(self.lm_heads)):
            for name in (f"{i}.{self.depth}.weight", f"lm_heads.{i}.weight"):
                check_size(shapes, name, 0, self.config.target.vocab)

    def drafts_of(self, states: Tensor, count: int) -> Tensor:
        """Return the tokens of the first heads: [m, E] -> [m, count] int32."""
        found = []
        for block, head in zip(self.blocks, self.lm_heads[:count]):
            ids, _ = argmax(head(block(states), True))
            lazy_fusion.flush()
            found.append(ids)
        return torch.stack(found, dim=1)
