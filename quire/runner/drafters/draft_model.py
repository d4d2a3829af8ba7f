"""A smaller model of the same vocabulary, with keys and values for each token.

Its first pass takes the tokens that the step added: one, or as many as were accepted and one more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quire.attention.base import Backend
from quire.kernels.argmax import argmax
from quire.kernels.framework import lazy_fusion
from quire.models.base import LanguageModel, StepInputs
from quire.runner.drafters._chain import ChainDrafter
from quire.runner.drafters._passes import PassLimits


class _WholeModel:
    """A model as a chain: its states are of no use to later passes."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @property
    def module(self) -> nn.Module:
        assert isinstance(self._model, nn.Module)
        return self._model

    @property
    def selects_rows(self) -> bool:
        return bool(getattr(self._model, "selects_rows", False))

    def begin(self, hidden: Tensor, taps: Mapping[int, Tensor], at: Tensor) -> Tensor:
        return hidden[:0]

    def __call__(self, step: StepInputs, states: Tensor) -> Tensor:
        hidden = self._model(step)
        lazy_fusion.flush()  # it is read by torch
        return hidden

    def drafts(self, states: Tensor) -> Tensor:
        ids, _ = argmax(self._model.logits(states))
        lazy_fusion.flush()
        return ids


def build(
    model: LanguageModel, backend: Backend, limits: PassLimits, device: torch.device, slots: int
) -> ChainDrafter:
    """Build the drafter. slots: of the engine."""
    return ChainDrafter(_WholeModel(model), backend, limits, device, slots)
