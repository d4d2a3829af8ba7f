"""Stage masks: grammar masks of a step, made where the grammars are for the stage that samples.

The engine's process has the grammars and runs the first pipeline stage. When it builds a step all
tokens before are known, because a sequence is in one step at a time: so the masks go with the step.
The tokens come back with the result, and are committed to the matchers then.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from quire.core.types import StepResult
from quire.runner.model_input import ModelInput
from quire.runner.step_batch import StepBatch
from quire.sampling.steps.grammar_masks import ConstrainedSlots, GrammarMasks, PlainMasks


class SentMasks(NamedTuple):
    """What to do with the result of a step with constrained rows."""

    batch: StepBatch
    masks: GrammarMasks | None  # None: of rows that failed to join alone
    join_errors: dict[int, str]  # by row of the plan

    def commit(self, result: StepResult) -> None:
        """Commit the tokens, and add to the result which texts have ended, and how."""
        for row, error in self.join_errors.items():
            result.errors[row] = error
        if self.masks is None:
            return
        rows = self.batch.sampled_rows
        ids = [result.token_ids[row][0] for row in rows]
        failed = [result.row_error(row) is not None for row in rows]
        tops = np.where(failed, np.float32("nan"), np.float32(0))
        self.masks.set_fetch(lambda: (ids, tops))
        self.masks.commit_tokens()
        result.finish_reasons.update({rows[i]: end for i, end in self.masks.ends.items()})
        result.errors.update({rows[i]: text for i, text in self.masks.errors.items()})
        result.request_errors.update({rows[i]: text for i, text in self.masks.refusals.items()})


class MaskSender:
    """Fills the masks of the steps of an engine, in plan order."""

    def __init__(self, slots: ConstrainedSlots) -> None:
        self._slots = slots
        self._join_errors: dict[int, str] = {}  # by slot

    def attach(self, step: ModelInput) -> tuple[ModelInput, SentMasks | None]:
        """Return the step with the masks of its constrained rows in place of what makes them."""
        for slot in step.leaves:
            self._slots.leave(slot)
            self._join_errors.pop(slot, None)
        joins = []
        for joined in step.joins:
            self._join_errors.pop(joined.slot, None)
            try:
                self._slots.join(joined)
            except Exception as error:  # noqa: BLE001 - it ends its sequence alone
                self._join_errors[joined.slot] = f"{type(error).__name__}: {error}"
            joins.append(msgspec.structs.replace(joined, constraint=None, thinking=None))
        step = msgspec.structs.replace(step, joins=tuple(joins))
        batch = step.batch
        if batch is None or not batch.sampled_rows:
            return step, None
        masks = self._slots.prepare_masks(batch.sampled_slots, batch.num_outputs)
        pairs = zip(batch.sampled_rows, batch.sampled_slots)
        errors = {row: self._join_errors[slot] for row, slot in pairs if slot in self._join_errors}
        if masks is None and not errors:
            return step, None
        if masks is not None and masks.needs_masks:
            step = msgspec.structs.replace(step, masks=PlainMasks.of(masks))
        return step, SentMasks(batch, masks, errors)
