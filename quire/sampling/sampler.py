"""Sampler: chooses one token per row from logits [R, V]. Owns the sampling state of every slot.

The order of a row's steps:

    logprobs (raw)  masks of constrained rows
    allowed ids, bad words, min_tokens, bias, penalties, forced tokens, custom processors
    | greedy: the greatest logit, of equal ones the lowest id
    | random: temperature, custom processors that keep the greatest, min_p, top_k, top_p, draw
    logprobs (processed)

A `BatchSamplingPlan` holds what a batch of slots needs and is reused while the same slots come
back, so a parameter that no row sets costs nothing and an all-greedy batch is one argmax. Rows do
not affect each other: a row's token and logprobs are the same bits in any batch.

Every rank of a model samples every row, from the same bits. Rows with a constraint are the
exception: only rank 0 has their grammars, and the others take its tokens (8 bytes a row, where a
mask has as many bits as the vocabulary has tokens).

Source: the order is that of vLLM V1's sampler, which users rely on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.distributed.collectives import Collectives, SingleProcessCollectives
from quire.distributed.mesh import Mesh
from quire.kernels.argmax import argmax
from quire.kernels.penalties import update_token_counts
from quire.kernels.sample import sample
from quire.kernels.token_mask import token_mask
from quire.sampling.constrained_sequence import GrammarLookup
from quire.sampling.cpu_chooser import CpuChooser
from quire.sampling.gpu_chooser import GpuChooser
from quire.sampling.logprobs import Mode, score_ids, score_top_k
from quire.sampling.processors import EngineLogitsProcessors, LogitsProcessor
from quire.sampling.sampler_output import SamplerOutput, ScoredRows
from quire.sampling.sampling_plan import (
    BatchSamplingPlan,
    LogprobGroup,
    TokenChooser,
    group_logprob_requests,
    logprob_request_of,
)
from quire.sampling.slot_join import SlotJoin
from quire.sampling.steps.base import SamplingStep, SlotBatch
from quire.sampling.steps.bias import LogitBias
from quire.sampling.steps.cpu_penalties import CpuPenalties
from quire.sampling.steps.forced_tokens import ForcedTokenMasks
from quire.sampling.steps.grammar_masks import (
    ConstrainedSlots,
    GrammarMasks,
    OutputCounts,
    PlainMasks,
    ReceivedMasks,
)
from quire.sampling.steps.masks import AllowedIds, BadWords, MinTokens
from quire.sampling.steps.request_processors import RequestLogitsProcessors
from quire.sampling.steps.time_stamps import TimeStamps
from quire.sampling.vocab_strips import VocabStrips

log = logging.getLogger(__name__)

GREEDY_PARAMS = SamplingParams(temperature=0.0)
"""Of sequences that could not be joined: they are sampled, and their tokens are not read."""

MAX_PLANS = 8
"""Batches that are remembered: a step with drafts may sample several, one after the other."""

ChooserKind = Literal["greedy", "random", "penalised"]
"""How rows can be chosen by tensors alone; each kind includes those before it."""


class Sampler:
    """The sampling state of max_seqs slots. A slot joins before it is sampled."""

    def __init__(
        self,
        vocab: int,
        max_seqs: int,
        device: torch.device | str = "cpu",
        *,
        logprobs_mode: Mode = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
        grammars: GrammarLookup | None = None,
        asynchronous: bool | None = None,
        comm: Collectives | None = None,
        mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
    ) -> None:
        """`processors`: engine-wide ones (quire.sampling.processors.load_processors).
        grammars: of the requests with a constraint; None: no request has one, or rank 0 has them.
        asynchronous: nothing waits for results, as a GPU needs; None: True on a GPU.
        comm, mesh: of the ranks that sample the same rows, rank 0 with the grammars; None: one.
        """
        self.vocab = vocab
        self.device = torch.device(device)
        self._mode = logprobs_mode
        self._comm = None if isinstance(comm, SingleProcessCollectives) else comm
        self._params: dict[int, SamplingParams] = {}
        self._join_errors: dict[int, str] = {}  # slots whose sequences could not be joined, and why
        self._general_slots: set[int] = set()  # slots that only `sample` can serve
        self._maskable_slots: set[int] = set()  # slots that may leave no token
        self._random_slots: set[int] = set()
        self._rank0_slots: set[int] = set()  # constrained: rank 0's tokens count on every rank
        self._penalized_slots: set[int] = set()
        self._history_slots: set[int] = set()  # draws depend on the outputs before them
        self._processors = EngineLogitsProcessors(processors)
        if asynchronous is None:
            asynchronous = self.device.type != "cpu"
        self._gpu_chooser = GpuChooser(vocab, max_seqs, self.device) if asynchronous else None
        self._cpu_chooser = CpuChooser(vocab, max_seqs) if self._gpu_chooser is None else None
        self.strips: VocabStrips | None = None
        """The strips of the vocabulary that `sample` takes; None: it takes all logits."""
        if comm is not None and self._cpu_chooser is not None and VocabStrips.exist(mesh, vocab):
            self.strips = VocabStrips(mesh, comm, vocab, max_seqs)
        chooser = self._gpu_chooser or self._cpu_chooser
        assert chooser is not None
        self._chooser: TokenChooser = chooser
        self._penalties: SamplingStep = CpuPenalties(vocab, max_seqs)
        if self._gpu_chooser is not None:
            self._penalties = self._gpu_chooser.penalties
        self._masking_steps: list[SamplingStep] = [
            AllowedIds(),
            BadWords(max_seqs, self.device),
            MinTokens(),
            LogitBias(),
            ForcedTokenMasks(),
            TimeStamps(max_seqs, self.device),
            RequestLogitsProcessors(),
            self._processors,
        ]
        self._steps: list[SamplingStep] = [
            *self._masking_steps[:4],
            self._penalties,
            *self._masking_steps[4:],  # what is forced is so whatever the penalties
        ]
        self._has_grammars = grammars is not None or self._comm is None
        self.constrained_slots = ConstrainedSlots(vocab, self.device, grammars)
        self._given_masks: PlainMasks | None = None
        self._plans: dict[tuple[int, ...], BatchSamplingPlan] = {}  # by slots, the oldest first

    def join(self, joined: SlotJoin) -> None:
        """A sequence takes a slot. Its tokens so far are all the history there is.

        What raises concerns this row only: each sampling of the row reports the error.
        """
        slot = joined.slot
        self.leave(slot)
        try:
            self._join(joined)
        except Exception as error:
            log.exception("request %s cannot be sampled", joined.request_id)
            self.leave(slot)
            self._params[slot] = GREEDY_PARAMS
            self._chooser.join(slot, GREEDY_PARAMS, 0)
            self._processors.join(joined)
            self._general_slots.add(slot)
            self._join_errors[slot] = f"{type(error).__name__}: {error}"
        constrained = joined.constraint is not None
        if self._comm is not None and constrained:  # also if rank 0 alone raised
            self._rank0_slots.add(slot)
        reading = any(one.reads_outputs and one.applies_to(slot) for one in self._steps)
        if constrained or joined.thinking is not None or reading:
            self._history_slots.add(slot)

    def _join(self, joined: SlotJoin) -> None:
        slot, params = joined.slot, joined.params
        self._params[slot] = params
        self._chooser.join(slot, params, joined.seed)
        if joined.constraint is None or self._has_grammars:
            self.constrained_slots.join(joined)
        for step in self._steps:
            step.join(joined)
        if any(step.applies_to(slot) for step in self._masking_steps):
            self._maskable_slots.add(slot)
        if logprob_request_of(params) is not None or slot in self._maskable_slots:
            self._general_slots.add(slot)
        if not params.greedy:
            self._random_slots.add(slot)
        if self._penalties.applies_to(slot):
            self._penalized_slots.add(slot)

    def leave(self, slot: int) -> None:
        """The slot is empty."""
        self._plans.clear()
        self._params.pop(slot, None)
        self._join_errors.pop(slot, None)
        self._general_slots.discard(slot)
        self._maskable_slots.discard(slot)
        self._random_slots.discard(slot)
        self._rank0_slots.discard(slot)
        self._penalized_slots.discard(slot)
        self._history_slots.discard(slot)
        self.constrained_slots.leave(slot)
        for step in self._steps:
            step.leave(slot)

    def set_masks(self, masks: PlainMasks | None) -> None:
        """Set masks of the next sampling that another process has filled; None: none has."""
        self._given_masks = masks

    def recover(self) -> None:
        """Drop the partial results of a failed sampling. Its slots are joined again."""
        self._plans.clear()
        self.constrained_slots.recover()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Run the kernels of constrained rows once. dtype: of the model's logits."""
        words = torch.zeros((1, -(-self.vocab // 32)), dtype=torch.int32, device=self.device)
        for kind in {dtype, torch.float32}:
            logits = torch.zeros((1, self.vocab), dtype=kind, device=self.device)
            token_mask(logits, words, torch.full_like(words[0, :1], -1))

    def reads_outputs(self, slot: int) -> bool:
        """Whether a draw of the slot depends on more than its logits, position and seed: on the
        outputs before it. The same on every rank."""
        return slot in self._history_slots

    def share_decisions(self, slots: Sequence[int], decisions: list[bool]) -> list[bool]:
        """Return a decision per slot with which all ranks agree: rank 0's of constrained slots."""
        rows = [i for i, slot in enumerate(slots) if slot in self._rank0_slots]
        if not rows:
            return decisions
        assert self._comm is not None
        own = torch.tensor([int(decisions[i]) for i in rows], device=self.device)
        for i, decision in zip(rows, self._comm.broadcast(own).tolist()):
            decisions[i] = bool(decision)
        return decisions

    def prepare_masks(
        self, slots: tuple[int, ...], positions: OutputCounts, at: Sequence[int] | None = None
    ) -> GrammarMasks | None:
        """The grammar masks of the next sampling; None: no row is constrained.

        If they have `needs_masks`, apply them before `choose`; `sample` does so by itself. Then
        call their set_fetch(). positions: as for `sample`. at: where the slots' rows are among
        those of the step; None: they are all.
        """
        given, optimistic = self._given_masks, frozenset[int]()
        constrained = given is not None or self.constrained_slots.has_constrained
        if self._cpu_chooser is not None and constrained:
            optimistic = self._get_plan(slots).optimistic_rows
        if given is not None:
            packed, only = given.unpack(at), frozenset(given.grammar_only)
            if at is not None:
                only = frozenset(i for i, row in enumerate(at) if row in only)
            if packed is None:
                return None
            return ReceivedMasks(self.constrained_slots, packed, optimistic & only)
        return self.constrained_slots.prepare_masks(slots, positions, optimistic)

    def kind(self, slots: Sequence[int]) -> ChooserKind | None:
        """How `choose` can serve these slots; None: only `sample` can.

        Call it before each choose or replay of one, after the step's joins: it starts the copy of
        the slots' parameters to the device.
        """
        if self._gpu_chooser is not None:
            self._gpu_chooser.table.flush()
        if not (self._general_slots | self._rank0_slots).isdisjoint(slots):
            return None
        if not self._penalized_slots.isdisjoint(slots):
            return "penalised"
        return "greedy" if self._random_slots.isdisjoint(slots) else "random"

    def draws_alone(self, slots: Sequence[int]) -> bool:
        """Whether `choose` can serve these slots whatever tokens they have put out, and no grammar
        has to know them."""
        if self.constrained_slots.has_constrained or self._given_masks is not None:
            return False
        return self._history_slots.isdisjoint(slots) and self.kind(slots) in ("greedy", "random")

    def choose(
        self, logits: Tensor, row_slots: Tensor, outputs: Tensor, kind: ChooserKind
    ) -> tuple[Tensor, Tensor]:
        """A token for each row, from device tensors alone: a graph can capture it.

        logits: [R, V], not changed. row_slots: [R] int32, -1 for rows that are not read. outputs:
        [R] int32, tokens each sequence has put out already. Both are ignored if kind is greedy.
        The token counts of penalised rows are updated here, so each of their steps is sampled once.
        Returns ids [R] int32 and each row's best logit [R] float32 (see SamplerOutput.top_logits).
        """
        if kind == "greedy":
            return argmax(logits)
        assert self._gpu_chooser is not None
        lines, counts = self._gpu_chooser.table.rows, self._gpu_chooser.penalties
        seen = counts.token_counts if kind == "penalised" else None
        drawn = sample(logits, row_slots, outputs, lines, counts=seen)
        if seen is not None:
            update_token_counts(drawn.ids, row_slots, seen)
        return drawn.ids, drawn.max_logits

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        grammar_masks: GrammarMasks | None = None,
    ) -> SamplerOutput:
        """Choose a token for each row.

        logits: [R, V], row i of slot slots[i], or this rank's strip of them if there are `strips`;
        they may be overwritten. positions[i]: how many outputs the sequence has already; with its
        seed it determines the draw.
        grammar_masks: of these slots.
        """
        plan = self._get_plan(tuple(slots))
        masks = None if grammar_masks is None or not grammar_masks.needs_masks else grammar_masks
        if self.strips is not None:
            assert self._cpu_chooser is not None
            if masks is None and not plan.needs_all_logits:
                rows, strips = plan.chooser_rows, self.strips
                chosen = self._cpu_chooser.choose_from_strips(logits, rows, positions, strips)
                return SamplerOutput(*chosen)
            logits = self.strips.gather(logits)
        if plan.is_all_greedy and masks is None:
            return SamplerOutput(*self._chooser.greedy(logits))
        return self._sample(logits, plan, positions, masks)

    def _sample(
        self,
        logits: Tensor,
        plan: BatchSamplingPlan,
        positions: Sequence[int],
        masks: GrammarMasks | None,
    ) -> SamplerOutput:
        faults = dict(plan.row_errors)
        due = [edit for edit in plan.edits if edit.is_due(positions)]
        work = logits.float().contiguous() if due else logits
        changes = work.data_ptr() == logits.data_ptr() and (bool(due) or masks is not None)
        raw = self._raw_rows(logits, plan, changes=changes)
        if masks is not None:
            masks.apply_masks(work)
        for edit in due:
            edit.apply(work, positions, faults)
        if plan.scale is not None:
            self._processors.run(self._processors.argmax_invariant, work.div_(plan.scale), faults)
        ids, tops, choice = self._chooser.choose(work, plan.chooser_rows, positions)
        if masks is not None and self._cpu_chooser is not None:
            again = masks.rejected(ids, tops)
            if again is not None:
                at = again.rows.long()
                drawn = self._cpu_chooser.redraw_masked(work, plan.chooser_rows, positions, again)
                ids[at], tops[at] = drawn
        if plan.rank0_rows is not None:
            assert self._comm is not None
            ids[plan.rank0_rows] = self._comm.broadcast(ids[plan.rank0_rows])
        for edit in plan.edits:
            edit.on_sampled(ids)
        made = SamplerOutput(ids, tops, faults, maskable_rows=plan.maskable_rows)
        if plan.logprob_groups:
            if raw is None:
                final = self._chooser.processed(work, plan.chooser_rows, choice)
                raw = [_select_rows(final, group.at) for group in plan.logprob_groups]
            made.scored = [self._score(ids, *pair) for pair in zip(plan.logprob_groups, raw)]
        return made

    # --- plans ---

    def _get_plan(self, slots: tuple[int, ...]) -> BatchSamplingPlan:
        plan = self._plans.get(slots)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[slots] = self._build_plan(slots)
        return plan

    def _build_plan(self, slots: tuple[int, ...]) -> BatchSamplingPlan:
        batch = SlotBatch(slots, self.vocab, self.device)
        edits = [edit for step in self._steps if (edit := step.build_edit(batch)) is not None]
        params = [self._params[slot] for slot in slots]
        random = not all(p.greedy for p in params)
        scale = None
        if self._processors.argmax_invariant and random:
            scale = batch.tensor([1.0 if p.greedy else p.temperature for p in params])[:, None]
        return BatchSamplingPlan(
            slots=slots,
            edits=edits,
            has_random=random,
            chooser_rows=self._chooser.prepare_rows(batch, params, scale is not None),
            logprob_groups=group_logprob_requests(batch, params),
            optimistic_rows=frozenset()
            if scale is not None
            else self._optimistic_rows(slots, params),
            scale=scale,
            row_errors={
                row: self._join_errors[slot] for row, slot in batch.rows_in(self._join_errors)
            },
            maskable_rows=frozenset(row for row, _ in batch.rows_in(self._maskable_slots)),
            rank0_rows=self._find_rank0_rows(batch),
        )

    def _find_rank0_rows(self, batch: SlotBatch) -> Tensor | None:
        rows = [row for row, _ in batch.rows_in(self._rank0_slots)]
        return batch.tensor(rows) if rows else None

    def _optimistic_rows(
        self, slots: Sequence[int], params: Sequence[SamplingParams]
    ) -> frozenset[int]:
        chooser, particular = self._cpu_chooser, self._general_slots | self._penalized_slots
        if chooser is None:
            return frozenset()
        rows = enumerate(zip(slots, params, strict=True))
        return frozenset(
            i for i, (slot, p) in rows if slot not in particular and chooser.can_draw_before_mask(p)
        )

    # --- logprobs ---

    def _raw_rows(
        self, logits: Tensor, plan: BatchSamplingPlan, *, changes: bool
    ) -> list[Tensor] | None:
        """Per logprob group its rows of raw logits. None if processed logits are scored.

        changes: the logits will be overwritten.
        """
        if self._mode.startswith("processed"):
            return None
        rows = [_select_rows(logits, group.at) for group in plan.logprob_groups]
        return [x.clone() if x is logits and changes else x for x in rows]

    def _score(self, ids: Tensor, group: LogprobGroup, logits: Tensor) -> ScoredRows:
        as_logits = self._mode.endswith("_logits")
        chosen, k, scratch = _select_rows(ids, group.at), group.request.k, self._chooser.scratch
        if group.ids is None:
            scores = score_top_k(logits, chosen, k, scratch, as_logits=as_logits)
            return ScoredRows(group.rows, k, scores)
        listed = group.ids.expand(len(group.rows), -1)
        scores = score_ids(logits, chosen, listed, scratch, as_logits=as_logits)
        return ScoredRows(group.rows, listed.shape[1], scores)


def _select_rows(x: Tensor, at: Tensor | None) -> Tensor:
    return x if at is None else x.index_select(0, at)
