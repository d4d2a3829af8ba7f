"""The layer of MiMo, a model like Qwen 2, that predicts further tokens.

    x = input_proj(cat(hidden_layernorm(h[i]), token_layernorm(embedding of t[i + 1])))

Source: https://huggingface.co/XiaomiMiMo/MiMo-7B-RL
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from quire.layers import AddRMSNorm, Linear, RMSNorm
from quire.models import qwen2
from quire.models.base import StepInputs
from quire.models.drafters import _mtp
from quire.models.drafters._base import DraftHead, HeadConfig, side_by_side

read_config = _mtp.read_config


class Head(DraftHead):
    weights = replace(
        qwen2.Model.weights,
        ignore=("*.rotary_emb.inv_freq",),
        absent=("layers.", "embed_tokens.", "norm.", "lm_head."),
    )

    def __init__(self, config: HeadConfig, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights."""
        super().__init__(config)
        c = config.target
        layer: Any = qwen2.Model.layer_class(config.layer, 0)
        layer.token_layernorm = RMSNorm(c.hidden, c.norm_eps)
        layer.hidden_layernorm = RMSNorm(c.hidden, c.norm_eps)
        layer.input_proj = Linear(2 * c.hidden, c.hidden)
        layer.final_layernorm = AddRMSNorm(c.hidden, c.norm_eps)
        self.mtp_layers = nn.ModuleList([layer])
        further = {int(one.split(".")[2]) for one in names if one.startswith("model.mtp_layers.")}
        spare = tuple(f"mtp_layers.{i}." for i in sorted(further - {0}))
        self.weights = replace(Head.weights, absent=(*Head.weights.absent, *spare))

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        layer = cast(Any, self.mtp_layers[0])
        embeddings = layer.token_layernorm(_mtp.embed_known(self, step))
        both = side_by_side(layer.hidden_layernorm(states), embeddings)
        x, res = layer(layer.input_proj(both), None, step)
        return _mtp.flushed(layer.final_layernorm(x, res)[0])
