"""Stage masks: grammar masks of a step, made where the grammars are for the stage that samples.

The engine's process has the grammars and runs the first pipeline stage. When it builds a step all
tokens before are known, because such a sequence is in one step at a time: so the masks go with it.
The tokens come back with the result, and are committed to the matchers then. Masks behind drafts
are those of copies of the matchers, of which the one that has come as far as the result stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from quire.core.types import StepResult
from quire.runner.model_input import ModelInput
from quire.runner.step_batch import StepBatch
from quire.sampling.constrained_sequence import ConstrainedSequence
from quire.sampling.steps.grammar_masks import ConstrainedSlots, GrammarMasks, PlainMasks


class SentMasks(NamedTuple):
    """What to do with the result of a step with constrained rows."""

    batch: StepBatch
    slots: ConstrainedSlots
    sequences: dict[int, ConstrainedSequence]
    """By index among the sampled tokens: as it is if all drafts before are accepted."""
    join_errors: dict[int, str]  # by row of the plan

    def commit(self, result: StepResult) -> StepResult:
        """Commit the tokens. Return the result with what texts have ended, and how."""
        for row, error in self.join_errors.items():
            result.errors[row] = error
        if not self.sequences:
            return result
        kept = self._kept(result)
        ids = np.zeros(len(self.batch.sampled_rows), np.int64)
        tops = np.full(len(ids), np.nan, np.float32)
        for row, own in kept.items():
            ids[own] = result.token_ids[row]
            tops[own] = 0
            if result.row_error(row) is not None:
                tops[own[-1]] = np.nan
        masks = GrammarMasks(
            self.slots,
            [
                (i, self.sequences[i], 0)
                for own in kept.values()
                for i in own
                if i in self.sequences
            ],
        )
        masks.set_fetch(lambda: (ids.tolist(), tops))
        masks.commit_tokens()
        tokens = [*result.token_ids]
        for row, own in kept.items():
            tokens[row] = tokens[row][: self._finish_row(row, own, masks, result)]
        return replace(result, token_ids=tokens)

    def _kept(self, result: StepResult) -> dict[int, list[int]]:
        """Return which of the sampled tokens were accepted, by row of the plan."""
        kept: dict[int, list[int]] = {}
        for i, row in enumerate(self.batch.sampled_rows):
            own = kept.setdefault(row, [])
            if len(own) < len(result.token_ids[row]):
                own.append(i)
        return kept

    def _finish_row(self, row: int, own: list[int], masks: GrammarMasks, result: StepResult) -> int:
        """Add to the result how a row ends, if it does. Return how many of its tokens count."""
        last = next((i for i in own if i in masks.over), own[-1])
        if last in masks.over and last != own[-1]:  # what comes behind it does not
            for kind in (result.errors, result.request_errors, result.non_finite):
                kind.pop(row, None)
        if last in masks.ends:
            result.finish_reasons[row] = masks.ends[last]
        if last in masks.errors:
            result.errors[row] = masks.errors[last]
        if last in masks.refusals:
            result.request_errors[row] = masks.refusals[last]
        if own[0] in self.sequences:
            slot = self.batch.sampled_slots[own[0]]
            self.slots.replace(slot, self.sequences[own[0]], self.sequences[last])
        return own.index(last) + 1


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
        sequences: dict[int, ConstrainedSequence] = {}
        if masks is not None:
            drafts = batch.next_drafts or [-1] * len(batch.sampled_rows)
            filled = PlainMasks.of(_samplings(masks.before(drafts), drafts, sequences))
            step = msgspec.structs.replace(step, masks=filled)
        return step, SentMasks(batch, self._slots, sequences, errors)


def _samplings(
    masks: GrammarMasks | None,
    drafts: Sequence[int],
    sequences: dict[int, ConstrainedSequence],
) -> Iterator[GrammarMasks]:
    """Yield masks to fill: those before all drafts, then those behind the first ones, and so on.

    sequences: gets the sequences of all.
    """
    while masks is not None:
        yield masks
        sequences.update(masks.sequences)
        masks = masks.behind(drafts)
