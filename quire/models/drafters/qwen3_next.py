"""The layer of Qwen3-Next that predicts further tokens: one with attention, like the model's.

    x = fc(cat(pre_fc_norm_embedding(embedding of t[i + 1]), pre_fc_norm_hidden(h[i])))

h is the model's state after its last norm; later passes read norm(layer(x)) in its place. Logits
are those of the model's head. Of several such layers the first one makes all drafts.

Source: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, tensors named mtp.*
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from quire.config.recurrent_layers import ATTENTION
from quire.errors import ConfigError
from quire.layers import AddRMSNorm, Linear, RMSNorm
from quire.models import qwen3_next
from quire.models.base import Hf, ModelConfig, StepInputs
from quire.models.drafters import _mtp
from quire.models.drafters._base import DraftHead, HeadConfig, side_by_side


def read_config(hf: Hf, target: ModelConfig) -> HeadConfig:
    """Return the config of one layer with attention, like those of the target."""
    found = _mtp.read_config(hf, target)
    return replace(found, layer=replace(found.layer, kinds=(ATTENTION,), states=()))


class Head(DraftHead):
    model: ClassVar[type[qwen3_next.Model]] = qwen3_next.Model

    def __init__(self, config: HeadConfig, names: Collection[str]) -> None:
        """names: of the checkpoint's tensors; none: of dummy weights."""
        super().__init__(config)
        c = cast(Any, config.layer)
        self.mtp: Any = nn.Module()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self.mtp.add_module(name, RMSNorm(c.hidden, c.norm_eps, offset=c.norm_offset))
        self.mtp.fc = Linear(2 * c.hidden, c.hidden)
        self.mtp.layers = nn.ModuleList([self.model.layer_class(c, 0)])
        self.mtp.norm = AddRMSNorm(c.hidden, c.norm_eps, offset=c.norm_offset)
        own = [one.split(".") for one in names if one.startswith("mtp.layers.")]
        spare = tuple(f"mtp.layers.{i}." for i in sorted({int(one[2]) for one in own} - {0}))
        absent = ("layers.", "embed_tokens.", "norm.", "lm_head.", *spare)
        ignore = tuple(one for one in self.model.weights.ignore if one != "mtp.*")
        self.weights = replace(self.model.weights, absent=absent, ignore=ignore)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if shapes and not any(name.startswith("mtp.") for name in shapes):
            raise ConfigError(
                "speculative_config: method 'mtp' needs the layer of the checkpoint that predicts "
                "further tokens, and this one has no tensors named mtp.*: use ngram or suffix, or "
                "a checkpoint that has them"
            )
        super().check_shapes(shapes)

    def forward(self, step: StepInputs, states: Tensor) -> Tensor:
        mtp = self.mtp
        embeddings = mtp.pre_fc_norm_embedding(_mtp.flushed(self.embed(step)))
        both = side_by_side(embeddings, mtp.pre_fc_norm_hidden(states))
        x, res = mtp.layers[0](mtp.fc(both), None, step)
        return _mtp.flushed(mtp.norm(x, res)[0])
