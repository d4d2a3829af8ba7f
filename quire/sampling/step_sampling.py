"""Step sampling: samples the tokens of a step, behind drafts as far as these agree.

Drafts are verified by sampling as always behind each of them: a token that differs from its draft
is the last of its row. A draw that depends on logits and position alone is made behind all drafts
of the row at once. One that depends on the outputs before (penalties, grammars, ...) is made draft
by draft: the row's state advances with its outputs only, and never has to go back.

Axes: R sampled tokens; of a row with drafts several, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.core.types import TokenLogprobs
from quire.sampling.constrained_sequence import FinishKind
from quire.sampling.sampler import Sampler
from quire.sampling.sampler_output import RowErrors
from quire.sampling.steps.grammar_masks import GrammarMasks, OutputCounts

NOT_SAMPLED = -1


@dataclass(slots=True)
class StepTokens:
    """What was sampled, by index among the R tokens."""

    ids: Sequence[int]  # [R]; NOT_SAMPLED: behind a draft that does not agree
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    row_errors: RowErrors = field(default_factory=lambda: RowErrors({}, {}, {}))
    finish_reasons: dict[int, FinishKind] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Tokens with which a sequence has ended on rank 0, which alone has its grammar."""

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        logprobs: dict[int, TokenLogprobs],
        row_errors: RowErrors,
        masks: GrammarMasks | None,
    ) -> StepTokens:
        """masks: of the sampling, committed."""
        if masks is None:
            return cls(ids, logprobs, row_errors)
        refusals = {**row_errors.refusals, **masks.refusals}
        errors = {i: text for i, text in row_errors.errors.items() if i not in refusals}
        errors |= masks.errors
        known = refusals.keys() | errors.keys()
        non_finite = {i: text for i, text in row_errors.non_finite.items() if i not in known}
        return cls(ids, logprobs, RowErrors(errors, refusals, non_finite), masks.ends)

    @property
    def ends(self) -> set[int]:
        """Tokens with which their sequences end: they are complete, or have errors."""
        failed = (i for kind in self.row_errors for i in kind)
        return {*self.ended, *self.finish_reasons, *failed}

    def add(self, found: StepTokens, at: Sequence[int]) -> None:
        """Add what was sampled of the tokens `at`."""
        ids = list(self.ids)
        for i, token in zip(at, found.ids, strict=True):
            ids[i] = token
        self.ids = ids
        self.logprobs |= {at[i]: value for i, value in found.logprobs.items()}
        self.finish_reasons |= {at[i]: value for i, value in found.finish_reasons.items()}
        for own, more in zip(self.row_errors, found.row_errors):
            own.update({at[i]: text for i, text in more.items()})


class StepSampling:
    """One step's sampling: make it before the forward pass, and call run() with the logits."""

    def __init__(
        self,
        sampler: Sampler,
        slots: tuple[int, ...],
        outputs: OutputCounts,
        next_drafts: Sequence[int] = (),
        agrees: Callable[[int, int], bool] | None = None,
    ) -> None:
        """slots, outputs: as Sampler.sample has them. next_drafts, agrees: as StepBatch has them;
        without drafts they may be left out."""
        self._sampler, self._slots = sampler, slots
        self._agrees = agrees or (lambda i, token: False)
        self._outputs = outputs if isinstance(outputs, list) else outputs.tolist()
        self._first: list[int] | None = None
        """Tokens of the first pass; None: all, and no other pass follows."""
        if needs_passes(sampler, slots, next_drafts):
            reads = [sampler.reads_outputs(slot) for slot in slots]
            behind = [False, *(draft >= 0 for draft in next_drafts[:-1])]
            self._first = [i for i in range(len(slots)) if not (behind[i] and reads[i])]
        self.masks = self._prepare_masks(self._first)
        """Of the first pass."""

    def run(self, logits: Tensor) -> StepTokens:
        """logits: [R, V], or a strip of them. They may be overwritten."""
        if self._first is None:
            return self._sample(logits, None, self.masks)
        found = StepTokens([NOT_SAMPLED] * len(self._slots))
        at, masks = self._first, self.masks
        while at:
            chosen = logits.index_select(0, torch.tensor(at, device=logits.device))
            found.add(self._sample(chosen, at, masks), at)
            at = self._next_pass(at, found)
            masks = self._prepare_masks(at) if at else None
        return found

    def _next_pass(self, at: list[int], found: StepTokens) -> list[int]:
        """Return the tokens behind those drafts that agree, of rows that read their outputs."""
        sampler, slots = self._sampler, self._slots
        agree = [i for i in at if self._agrees(i, found.ids[i]) and sampler.reads_outputs(slots[i])]
        ends = found.ends
        over = sampler.share_decisions([slots[i] for i in agree], [i in ends for i in agree])
        found.ended |= {i for i, ended in zip(agree, over) if ended}
        return [i + 1 for i, ended in zip(agree, over) if not ended]

    def _prepare_masks(self, at: list[int] | None) -> GrammarMasks | None:
        if at is None:
            return self._sampler.prepare_masks(self._slots, self._outputs)
        slots, outputs = self._select(at)
        return self._sampler.prepare_masks(slots, outputs, at)

    def _select(self, at: list[int]) -> tuple[tuple[int, ...], list[int]]:
        return tuple(self._slots[i] for i in at), [self._outputs[i] for i in at]

    def _sample(
        self, logits: Tensor, at: list[int] | None, masks: GrammarMasks | None
    ) -> StepTokens:
        slots, outputs = (self._slots, self._outputs) if at is None else self._select(at)
        sampled = self._sampler.sample(logits, slots, outputs, masks)
        ids = sampled.token_ids.tolist()
        if masks is not None:
            tops = sampled.top_logits.cpu().numpy()
            masks.set_fetch(lambda: (ids, tops))
            masks.commit_tokens()
        return StepTokens.of(ids, sampled.logprobs(), sampled.row_errors, masks)


def needs_passes(sampler: Sampler, slots: tuple[int, ...], next_drafts: Sequence[int]) -> bool:
    """Whether a row with drafts is to be sampled draft by draft."""
    return any(
        draft >= 0 and sampler.reads_outputs(slot) for slot, draft in zip(slots, next_drafts)
    )
