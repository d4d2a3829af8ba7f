"""Pending step: a step enqueued on the device, its inputs there and where its results will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionMetadata, CrossMetadata
from quire.core.types import StepResult
from quire.runner.device_worker import build_step_result
from quire.runner.gpu.mixed_batch_graphs import GraphShape
from quire.runner.parts.base import PendingPart
from quire.runner.step_batch import Ints, StepBatch, ahead_place
from quire.sampling.sampler import ChooserKind, Sampler
from quire.sampling.sampler_output import HostSamplerOutput, find_row_errors
from quire.sampling.step_sampling import StepSampling, StepTokens, needs_passes
from quire.sampling.steps.grammar_masks import GrammarMasks


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """A step's integers on the device."""

    token_ids: Tensor  # [T]; -1: the slot's last token
    token_slots: Tensor  # [T]; negative: padding
    positions: Tensor  # [T]
    q_starts: Tensor  # [S + 1]
    contexts: Tensor  # [S]
    rows: Tensor  # [S]
    sampled: Tensor  # [R]
    row_slots: Tensor  # [R]; negative: padding
    outputs: Tensor  # [R]
    rotary: Tensor  # [T], or [axes, T]

    def metadata(
        self,
        tables: Sequence[Tensor],
        kv_slots: Tensor,
        bounds: StepBounds,
        cross: CrossMetadata | None = None,
    ) -> AttentionMetadata:
        """Return the step as attention reads it. tables: of the layer groups. kv_slots: [G, T]."""
        return AttentionMetadata(
            q_starts=self.q_starts,
            contexts=self.contexts,
            tables=tuple(tables),
            slots=kv_slots.unbind()[: len(tables)],
            max_query=bounds.max_query,
            max_context=bounds.max_context,
            rows=self.rows,
            decodes=bounds.decodes,
            past=bounds.past,
            drafts=bounds.drafts,
            prompts=bounds.prompts,
            cross=cross,
        )


class StepBounds(NamedTuple):
    """What the host knows of a step's numbers, as AttentionMetadata has it."""

    decodes: int
    max_query: int
    max_context: int
    past: int | None
    drafts: bool
    taps: bool = False  # a drafter reads hidden states
    prompts: Sequence[tuple[int, int]] = ()
    selects: bool = False  # the model leaves out tokens that are not sampled

    @classmethod
    def of_shape(
        cls, shape: GraphShape, max_context: int, *, taps: bool, selects: bool = False
    ) -> StepBounds:
        """Return those of all steps of a shape."""
        numbers = shape.decodes, shape.tokens, max_context, None
        return cls(*numbers, drafts=False, taps=taps, selects=selects)

    @classmethod
    def of(cls, batch: StepBatch, ahead: int = 0) -> StepBounds:
        """ahead: by so many the batch's contexts may be too small."""
        first = batch.num_decodes
        queries, contexts = np.diff(batch.q_starts[first:]), batch.contexts[first:]
        return cls(
            batch.num_decodes,
            batch.max_query,
            batch.max_context + ahead,
            batch.max_prior_context,
            bool(batch.next_drafts) and batch.num_decodes == len(batch.token_ids),
            batch.draft_inputs is not None,
            list(zip(queries.tolist(), contexts.tolist())),
        )


class SamplingWay(NamedTuple):
    """How a step is sampled: by tensors alone (kind), in any way (no kind), or in passes."""

    kind: ChooserKind | None = None
    masks: GrammarMasks | None = None
    passes: StepSampling | None = None  # of rows that are sampled draft by draft

    @classmethod
    def choose(cls, sampler: Sampler, inputs: StepBatch) -> SamplingWay:
        """Choose how to sample a step, before its forward pass."""
        slots, outputs, drafts = inputs.sampled_slots, inputs.num_outputs, inputs.next_drafts
        kind = sampler.kind(slots)
        if drafts and needs_passes(sampler, slots, drafts):
            return cls(passes=StepSampling(sampler, slots, outputs, drafts, inputs.agrees))
        return cls(kind, sampler.prepare_masks(slots, outputs) if slots else None)

    @property
    def graph_kind(self) -> ChooserKind | None:
        """The kind of its sampling graph; None: masks arrive late from the host, or tokens."""
        return None if self.masks is not None and self.masks.needs_masks else self.kind


class StepDrafts(Protocol):
    """Drafts behind a step, on their way to the host: there after the step's event."""

    def as_field(self, batch: StepBatch, tokens: StepTokens) -> Mapping[str, Any]:
        """Return them by row of the plan, as a field of the StepResult. batch: as it was run."""
        ...

    def of_row(self, row: int) -> Sequence[int]:
        """Return what was drafted behind a row of the plan: also without blocks for it."""
        ...


@dataclass(slots=True)
class PendingStep:
    """An enqueued step. Its numbers are in pinned memory after `done`."""

    batch: StepBatch
    done: torch.cuda.Event
    graph_output: Ints | None  # [2, at least R]: ids, then the bits of the tops
    sampler_output: HostSamplerOutput | None
    parts: Sequence[PendingPart]
    masks: GrammarMasks | None = None
    sampled: StepTokens | None = None  # None: not known yet
    drafts: StepDrafts | None = None  # behind what was sampled
    before: PendingStep | None = None  # that the batch continues, until its true numbers are known

    def __post_init__(self) -> None:
        if self.masks is not None:
            self.masks.set_fetch(self.tokens)

    def tokens(self) -> tuple[list[int], np.ndarray]:
        """Ids and tops of the rows that were sampled; waits for them."""
        self.done.synchronize()
        if self.sampler_output is not None:
            return self.sampler_output.token_ids(), self.sampler_output.top_logits
        if self.graph_output is None:
            return [], np.zeros(0, np.float32)
        rows = len(self.batch.sampled_rows)
        return self.graph_output[0, :rows].tolist(), self.graph_output[1, :rows].view(np.float32)

    def step_tokens(self) -> StepTokens:
        """What was sampled; waits for it."""
        if self.sampled is None:
            ids, tops = self.tokens()
            if self.masks is not None:
                self.masks.commit_tokens()
            # rows in a graph: rows that may leave no token are sampled outside
            output, errors = self.sampler_output, find_row_errors(tops, {}, frozenset())
            logprobs = {} if output is None else output.logprobs()
            errors = errors if output is None else output.row_errors
            self.sampled = StepTokens.of(ids, logprobs, errors, self.masks)
        return self.sampled

    def settled_batch(self) -> StepBatch:
        """Return the batch with its true numbers; waits for the step that it continues."""
        before, batch = self.before, self.batch  # in this order: a second thread may be here too
        if before is not None and batch.continued:
            self.batch, self.before = continued_batch(batch, before), None
        return self.batch

    def wait(self) -> StepResult:
        self.done.synchronize()
        self.settled_batch()
        sampled = self.step_tokens()
        extras: list[Mapping[str, Any]] = [part.result() for part in self.parts]
        if self.drafts is not None:
            extras.append(self.drafts.as_field(self.batch, sampled))
        return build_step_result(self.batch, sampled, extras)


def continued_batch(batch: StepBatch, before: PendingStep) -> StepBatch:
    """Return a batch that continues a step with its true numbers. Waits for that step.

    Drafts that are missing are 0: whatever they are, they are verified.
    """
    count = batch.continued
    if not count:
        return batch
    run, tokens = before.settled_batch(), before.step_tokens()
    yielded: dict[int, list[int]] = {}
    for i in run.accepted(tokens.ids, tokens.ends):
        yielded.setdefault(run.sampled_rows[i], []).append(tokens.ids[i])
    places = [ahead_place(code) for code in batch.token_ids[:count].tolist()]
    found = {row: yielded.get(row, [0]) for row, _ in places}  # [0]: its sequence has ended
    drafts = {row: before.drafts.of_row(row) if before.drafts else () for row in found}
    ids = [([found[row][-1], *drafts[row]] + [0] * place)[place] for row, place in places]
    more = np.zeros(len(batch.token_ids), dtype=np.int32)
    more[:count] = [len(found[row]) - 1 for row, _ in places]
    follows = [one != -1 for one in batch.next_drafts[:count]]
    drafted = [one if has else -1 for one, has in zip([*ids[1:], -1], follows)]
    contexts = batch.contexts + more[: len(batch.contexts)]
    rotary = batch.rotary
    return replace(
        batch,
        continued=0,
        token_ids=np.concatenate([np.array(ids, dtype=np.int32), batch.token_ids[count:]]),
        positions=batch.positions + more,
        contexts=contexts,
        num_outputs=batch.num_outputs + more[: len(batch.num_outputs)],
        max_context=int(contexts.max()),
        next_drafts=[*drafted, *batch.next_drafts[count:]],
        rotary=None if rotary is None else rotary + np.tile(more, len(rotary) // len(more)),
    )
