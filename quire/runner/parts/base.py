"""Contract of a part: one feature's share of a step, on both sides of an executor.

`prepare` runs on the engine thread and copies what the feature needs from the plan. On each worker
`before_forward` may replace inputs of the forward pass, and `apply` starts the feature's work after
it; the results are fields of the StepResult. Each file in this folder sets `PART` to its StepPart,
plain data that can be sent to another process. No other file names a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

from quire.core.types import StepPlan
from quire.models.base import LanguageModel, StepInputs
from quire.pooling.pooler import Pooler
from quire.registry import PluginRegistry
from quire.runner.step_batch import StepBatch
from quire.sampling.logprobs import Mode

PARTS = PluginRegistry("quire.runner.parts")


class ForwardOutput(NamedTuple):
    """The results of a step's forward pass that parts read."""

    model: LanguageModel
    hidden: Tensor  # [T, E] of every token in the step
    logprobs_mode: Mode
    pooler: Pooler | None = None  # None: the engine pools nothing


class PendingPart(Protocol):
    """Work of a part that was started."""

    def result(self) -> dict[str, Any]:
        """Return what to add to fields of the StepResult, by name: each is a dict by plan row.

        On a GPU, call it after the step's event.
        """
        ...


class NoPendingPart:
    """Of a part whose work was done before the forward pass."""

    def result(self) -> dict[str, Any]:
        return {}


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """One feature's share of one step."""

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> StepPart | None:
        """Copy what the feature needs from a plan with rows; None: no row uses the feature."""
        raise NotImplementedError

    @property
    def changes_inputs(self) -> bool:
        """Whether the forward pass has other inputs than without the part."""
        return type(self).before_forward is not StepPart.before_forward

    def before_forward(self, model: LanguageModel, step: StepInputs) -> StepInputs:
        """Return the inputs of the forward pass, from those that other parts returned."""
        return step

    def apply(self, forward: ForwardOutput) -> PendingPart:
        """Start the work, and the copies of its results to the host."""
        return NoPendingPart()


def load_part_types() -> dict[str, type[StepPart]]:
    """Return name -> class of every part."""
    return {name: PARTS.load(name).PART for name in PARTS.names()}
