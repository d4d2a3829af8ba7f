"""States part: what slots a step's recurrent states start from, and which it saves."""

from __future__ import annotations

from typing import ClassVar

from quire.core.types import StateMoves, StepPlan
from quire.models.base import LanguageModel
from quire.runner.parts.base import StepPart
from quire.runner.state_tensors import find_states
from quire.runner.step_batch import StepBatch


class StatesPart(StepPart, frozen=True, array_like=True):
    """Slots that start before the forward pass, and slots whose states are saved after it."""

    starts: list[int]
    start_rows: list[int]  # checkpoint of each; negative: zeros
    saves: list[int]
    save_rows: list[int]  # checkpoint that each is copied to
    draft_slots: list[int]  # whose rows have drafts
    draft_rows: list[list[int]]  # of each the checkpoints that get the states after its drafts

    keeps_graphs: ClassVar[bool] = True

    @classmethod
    def prepare(cls, plan: StepPlan, batch: StepBatch) -> StatesPart | None:
        """Copy from the plan; None: nothing starts and nothing is saved."""
        moves = next((one for one in plan.parts if isinstance(one, StateMoves)), None)
        if moves is None or not (plan.joins or any(moves)):
            return None
        return cls(
            [*(seq.slot for seq in plan.joins), *(one.slot for one in moves.accepted)],
            [*(seq.state_start for seq in plan.joins), *(one.checkpoint for one in moves.accepted)],
            [one.slot for one in moves.saves],
            [one.checkpoint for one in moves.saves],
            [one.slot for one in moves.drafts],
            [one.checkpoints for one in moves.drafts],
        )

    def write_inputs(self, model: LanguageModel, batch: StepBatch) -> None:
        """Set the states that the forward pass reads."""
        states = find_states(model)
        assert states is not None, "the model keeps no states"
        states.begin(self.starts, self.start_rows)
        states.set_drafts(batch, self.draft_slots, self.draft_rows)

    def after_forward(self, model: LanguageModel) -> None:
        """Save the states that the forward pass has written."""
        states = find_states(model)
        assert states is not None, "the model keeps no states"
        states.save(self.saves, self.save_rows)


PART = StatesPart
