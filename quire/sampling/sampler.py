"""From logits [R, V] to one token per row. Owns the sampling state of every slot.

The order of a row's steps:

    logprobs (raw)  masks of what the row is bound to
    allowed ids, bad words, min_tokens, bias, penalties, custom processors
    | greedy: the greatest logit, of equal ones the lowest id
    | random: temperature, custom processors that keep the greatest, min_p, top_k, top_p, draw
    logprobs (processed)

The one idea: a `Recipe` holds all a batch of slots needs, made once and used while the same slots
come back, so a parameter that no row sets costs nothing and an all-greedy batch is one argmax.
Rows do not touch each other: a row's token and logprobs are the same bits in any company.

Source: the order is that of vLLM V1's sampler, which users rely on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.types import UNKNOWN
from quire.core.types import Sequence as Seq
from quire.kernels.argmax import argmax
from quire.kernels.punish import tally
from quire.kernels.sample import sample
from quire.kernels.token_mask import token_mask
from quire.sampling.bound import Grammars
from quire.sampling.device_lane import DeviceLane
from quire.sampling.host_lane import HostLane
from quire.sampling.logprobs import Mode, score, score_ids
from quire.sampling.processors import LogitsProcessor, Processors
from quire.sampling.recipe import Asking, Lane, Recipe, ask_of, group_asks
from quire.sampling.sampled import Sampled, Scored
from quire.sampling.steps.base import Batch, Step
from quire.sampling.steps.bias import LogitBias
from quire.sampling.steps.callables import Callables
from quire.sampling.steps.grammar import Binding, Counts, Grammar
from quire.sampling.steps.masks import AllowedIds, BadWords, MinTokens
from quire.sampling.steps.penalties import Penalties

log = logging.getLogger(__name__)

PLAIN = SamplingParams(temperature=0.0)
"""Of who cannot have what it asks: it is sampled all the same, and nobody reads that."""

Kind = Literal["greedy", "random", "penalised"]
"""What rows can be chosen by tensors alone; each serves what those before it do."""


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
        grammars: Grammars | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        """`processors`: engine-wide ones (quire.sampling.processors.load_processors).
        grammars: of the requests that have a constraint; None: there are none of those.
        asynchronous: nothing waits for results, as a GPU needs it; None: if the device is one.
        """
        self.vocab = vocab
        self.device = torch.device(device)
        self._mode = logprobs_mode
        self._params: dict[int, SamplingParams] = {}
        self._unfit: dict[int, str] = {}  # slots whose sequences could not be joined, and why
        self._general: set[int] = set()  # slots that only `sample` can serve
        self._banning: set[int] = set()  # slots that may leave no token
        self._random: set[int] = set()
        self._penalised: set[int] = set()
        self._processors = Processors(processors)
        if asynchronous is None:
            asynchronous = self.device.type != "cpu"
        self._device_lane = DeviceLane(vocab, max_seqs, self.device) if asynchronous else None
        self._host_lane = HostLane(vocab, max_seqs) if self._device_lane is None else None
        lane = self._device_lane or self._host_lane
        assert lane is not None
        self._lane: Lane = lane
        self._penalties: Step = Penalties(vocab, max_seqs)
        if self._device_lane is not None:
            self._penalties = self._device_lane.counts
        self._others: list[Step] = [
            AllowedIds(),
            BadWords(max_seqs, self.device),
            MinTokens(),
            LogitBias(),
            Callables(),
            self._processors,
        ]
        self._steps: list[Step] = [*self._others[:4], self._penalties, *self._others[4:]]
        self._grammar = Grammar(vocab, self.device, grammars)
        self._recipe: Recipe | None = None

    def join(self, slot: int, seq: Seq) -> None:
        """A sequence takes a slot. Its tokens so far are all the history there is.

        What raises is the row's alone: each sampling of it says so.
        """
        self.leave(slot)
        try:
            self._join(slot, seq)
        except Exception as error:
            log.exception("request %s cannot be sampled", seq.request.id)
            self.leave(slot)
            self._params[slot] = PLAIN
            self._lane.join(slot, PLAIN, 0)
            self._processors.join(slot, seq, _known(seq))
            self._general.add(slot)
            self._unfit[slot] = f"{type(error).__name__}: {error}"

    def _join(self, slot: int, seq: Seq) -> None:
        params = seq.request.params
        self._params[slot] = params
        self._lane.join(slot, params, seq.request.seed + seq.index)
        tokens = _known(seq)
        self._grammar.join(slot, seq, tokens)
        for step in self._steps:
            step.join(slot, seq, tokens)
        if any(step.holds(slot) for step in self._others):
            self._banning.add(slot)
        if ask_of(params) is not None or slot in self._banning:
            self._general.add(slot)
        if not params.greedy:
            self._random.add(slot)
        if self._penalties.holds(slot):
            self._penalised.add(slot)

    def leave(self, slot: int) -> None:
        """The slot is empty."""
        self._recipe = None
        self._params.pop(slot, None)
        self._unfit.pop(slot, None)
        self._general.discard(slot)
        self._banning.discard(slot)
        self._random.discard(slot)
        self._penalised.discard(slot)
        self._grammar.leave(slot)
        for step in self._steps:
            step.leave(slot)

    def mend(self) -> None:
        """A sampling raised half way: forget it. Its slots are to be joined anew."""
        self._recipe = None
        self._grammar.mend()

    def rehearse(self, dtype: torch.dtype) -> None:
        """Run what bound rows need once for nothing. dtype: of the model's logits."""
        words = torch.zeros((1, -(-self.vocab // 32)), dtype=torch.int32, device=self.device)
        for kind in {dtype, torch.float32}:
            logits = torch.zeros((1, self.vocab), dtype=kind, device=self.device)
            token_mask(logits, words, torch.full_like(words[0, :1], -1))

    def binding(self, slots: tuple[int, ...], positions: Counts) -> Binding | None:
        """What the rows of the next sampling are bound to; None: nothing.

        If it has `masks`, they are to be applied before `choose`; `sample` does so by itself. Then
        it is to be told where the tokens are. positions: as for `sample`.
        """
        ventures = frozenset[int]()
        if self._host_lane is not None and self._grammar.busy:
            ventures = self._recipe_of(slots).ventures
        return self._grammar.binding(slots, positions, ventures)

    def kind(self, slots: Sequence[int]) -> Kind | None:
        """How `choose` can serve these slots; None: it cannot, `sample` must.

        To be called before each choose or replay of one, after the step's joins: what the slots
        ask is on its way to the device when this returns.
        """
        if self._device_lane is not None:
            self._device_lane.table.flush()
        if not self._general.isdisjoint(slots):
            return None
        if not self._penalised.isdisjoint(slots):
            return "penalised"
        return "greedy" if self._random.isdisjoint(slots) else "random"

    def choose(
        self, logits: Tensor, row_slots: Tensor, outputs: Tensor, kind: Kind
    ) -> tuple[Tensor, Tensor]:
        """A token for each row, from device tensors alone: a graph can capture it.

        logits: [R, V], not changed. row_slots: [R] int32, -1 for rows that nobody reads. outputs:
        [R] int32, tokens each sequence has put out already. Both are ignored if kind is greedy.
        Penalised rows learn their tokens here, so each step of theirs is chosen once.
        Returns ids [R] int32 and each row's best logit [R] float32 (see Sampled.tops).
        """
        if kind == "greedy":
            return argmax(logits)
        assert self._device_lane is not None
        lines, counts = self._device_lane.table.lines, self._device_lane.counts
        seen = counts.seen if kind == "penalised" else None
        drawn = sample(logits, row_slots, outputs, lines, counts=seen)
        if seen is not None:
            tally(drawn.ids, row_slots, seen)
        return drawn.ids, drawn.tops

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        binding: Binding | None = None,
    ) -> Sampled:
        """Choose a token for each row.

        logits: [R, V], row i of slot slots[i]; they may be overwritten. positions[i]: how many
        outputs the sequence has already; with its seed it fixes the draw. binding: of these slots.
        """
        recipe = self._recipe_of(tuple(slots))
        masks = None if binding is None or not binding.masks else binding
        if recipe.simple and masks is None:
            return Sampled(*self._lane.greedy(logits))
        return self._sample(logits, recipe, positions, masks)

    def _sample(
        self, logits: Tensor, recipe: Recipe, positions: Sequence[int], masks: Binding | None
    ) -> Sampled:
        faults = dict(recipe.faults)
        due = [edit for edit in recipe.edits if edit.due(positions)]
        work = logits.float().contiguous() if due else logits
        changes = work.data_ptr() == logits.data_ptr() and (bool(due) or masks is not None)
        raw = self._raw(logits, recipe, changes=changes)
        if masks is not None:
            masks.mask(work)
        for edit in due:
            edit.apply(work, positions, faults)
        if recipe.scale is not None:
            self._processors.run(self._processors.keeping, work.div_(recipe.scale), faults)
        ids, tops, choice = self._lane.choose(work, recipe.rows, positions)
        if masks is not None and self._host_lane is not None:
            again = masks.refused(ids, tops)
            if again is not None:
                at = again.rows.long()
                drawn = self._host_lane.draw_again(work, recipe.rows, positions, again)
                ids[at], tops[at] = drawn
        for edit in recipe.edits:
            edit.drawn(ids)
        made = Sampled(ids, tops, faults, banning=recipe.banning)
        if recipe.asking:
            if raw is None:
                final = self._lane.processed(work, recipe.rows, choice)
                raw = [_rows(final, asking.at) for asking in recipe.asking]
            made.scored = [self._score(ids, *pair) for pair in zip(recipe.asking, raw)]
        return made

    # --- recipes ---

    def _recipe_of(self, slots: tuple[int, ...]) -> Recipe:
        if self._recipe is None or self._recipe.slots != slots:
            self._recipe = self._make_recipe(slots)
        return self._recipe

    def _make_recipe(self, slots: tuple[int, ...]) -> Recipe:
        batch = Batch(slots, self.vocab, self.device)
        edits = [edit for step in self._steps if (edit := step.edit(batch)) is not None]
        params = [self._params[slot] for slot in slots]
        random = not all(p.greedy for p in params)
        scale = None
        if self._processors.keeping and random:
            scale = batch.tensor([1.0 if p.greedy else p.temperature for p in params])[:, None]
        return Recipe(
            slots=slots,
            edits=edits,
            random=random,
            rows=self._lane.rows(batch, params, scale is not None),
            asking=group_asks(batch, params),
            ventures=frozenset() if scale is not None else self._ventures(slots, params),
            scale=scale,
            faults={row: self._unfit[slot] for row, slot in batch.of(self._unfit)},
            banning=frozenset(row for row, _ in batch.of(self._banning)),
        )

    def _ventures(self, slots: Sequence[int], params: Sequence[SamplingParams]) -> frozenset[int]:
        lane, particular = self._host_lane, self._general | self._penalised
        if lane is None:
            return frozenset()
        rows = enumerate(zip(slots, params, strict=True))
        return frozenset(i for i, (slot, p) in rows if slot not in particular and lane.ventures(p))

    # --- logprobs ---

    def _raw(self, logits: Tensor, recipe: Recipe, *, changes: bool) -> list[Tensor] | None:
        """Per group of askers their rows, as the model gave them. None if others are scored.

        changes: the logits will be written to.
        """
        if self._mode.startswith("processed"):
            return None
        rows = [_rows(logits, asking.at) for asking in recipe.asking]
        return [x.clone() if x is logits and changes else x for x in rows]

    def _score(self, ids: Tensor, asking: Asking, logits: Tensor) -> Scored:
        as_logits = self._mode.endswith("_logits")
        chosen, k, scratch = _rows(ids, asking.at), asking.ask.k, self._lane.scratch
        if asking.ids is None:
            scores = score(logits, chosen, k, scratch, as_logits=as_logits)
            return Scored(asking.rows, k, scores)
        listed = asking.ids.expand(len(asking.rows), -1)
        scores = score_ids(logits, chosen, listed, scratch, as_logits=as_logits)
        return Scored(asking.rows, listed.shape[1], scores)


def _rows(x: Tensor, at: Tensor | None) -> Tensor:
    return x if at is None else x.index_select(0, at)


def _known(seq: Seq) -> list[int]:
    """The tokens that are settled. An UNKNOWN is a draw to come, or one a preemption undid."""
    tokens = list(seq.tokens)  # at once: the scheduler may append meanwhile
    return tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens
