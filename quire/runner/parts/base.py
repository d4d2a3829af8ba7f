"""Contract of a part: one feature's share of a step, on both sides of an executor.

`prepare` runs on the engine thread and copies what the feature needs from the plan. `apply` runs
on each worker after the forward pass and starts the feature's work there; its results are fields of
the StepResult. Each file in this folder sets `PART` to its msgspec.Struct of plain data, so that
it can be sent to another process. No other file names a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.core.types import StepPlan
from quire.models.base import LanguageModel
from quire.registry import PluginRegistry
from quire.runner.step_batch import StepBatch
from quire.sampling.logprobs import Mode

PARTS = PluginRegistry("quire.runner.parts")


class ForwardOutput(NamedTuple):
    """The results of a step's forward pass that parts read."""

    model: LanguageModel
    hidden: Tensor  # [T, E] of every token in the step
    logprobs_mode: Mode


class PendingPart(Protocol):
    """Work of a part that was started."""

    def result(self) -> dict[str, Any]:
        """Return what to add to fields of the StepResult, by name: each is a dict by plan row.

        On a GPU, call it after the step's event.
        """
        ...


class StepPart(Protocol):
    """One feature's share of one step."""

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> StepPart | None:
        """Copy what the feature needs from a plan with rows; None: no row uses the feature."""
        ...

    def apply(self, forward: ForwardOutput) -> PendingPart:
        """Start the work, and the copies of its results to the host."""
        ...


def load_part_types() -> dict[str, type[StepPart]]:
    """Return name -> class of every part."""
    return {name: PARTS.load(name).PART for name in PARTS.names()}
