"""Text halves of models that embed a text or an image in one space: CLIP, SigLIP and SigLIP 2.

Axes: T tokens in the step, E hidden, P numbers of an embedding
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.framework import lazy_fusion
from quire.layers import Linear
from quire.models._plain import PlainConfig, PlainDecoder
from quire.models.base import ModelConfig, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(PlainConfig):
    """Config of a text half. projection: P."""

    projection: int
    projection_bias: bool = False


class DualEncoderText(PlainDecoder):
    """Its result is the projected state of each token, or the row of an image in its place."""

    def __init__(self, c: ProjectedConfig) -> None:
        super().__init__(c)
        del self.lm_head
        self.projection = Linear(c.hidden, c.projection, c.projection_bias)

    def forward(self, step: StepInputs) -> Tensor:
        x = super().forward(step)
        if step.result_rows is not None:
            lazy_fusion.flush()
            found = step.result_rows
            x = torch.where(found.is_row, found.rows.to(x.dtype), x)
        return x

    def finish(self, x: Tensor, res: Tensor | None) -> Tensor:
        return self.projection(super().finish(x, res))

    def set_head(self, c: ModelConfig, names: Collection[str]) -> None:
        if c.head != "none":
            raise ConfigError(
                "this model embeds texts and images: it has no labels; leave convert out, or give "
                "convert=embed"
            )

    def keep_stage(self, stage: range, *, tied: bool) -> None:
        raise ConfigError("models that embed texts or images cannot be cut into pipeline stages")
