"""From logits [R, V] to one token per row. Owns the sampling state of every slot.

The order of a row's steps:

    logprobs (raw)  allowed ids, bad words, min_tokens, bias, penalties, custom processors
    | greedy: the greatest logit, of equal ones the lowest id
    | random: temperature, custom processors that keep the greatest, min_p, top_k, top_p, draw
    logprobs (processed)

The one idea: a `Recipe` holds all a batch of slots needs, made once and used while the same slots
come back, so a parameter that no row sets costs nothing and an all-greedy batch is one argmax.
Rows do not touch each other: a row's token and logprobs are the same bits in any company.

Source: the order is that of vLLM V1's sampler, which users rely on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.core.types import UNKNOWN, TokenLogprobs
from quire.core.types import Sequence as Seq
from quire.sampling.cuts import Cut, Cuts, make_cuts
from quire.sampling.logprobs import Mode, Scores, score, score_ids
from quire.sampling.philox import Uniforms
from quire.sampling.processors import LogitsProcessor, Processors
from quire.sampling.rows import Scratch, argmax
from quire.sampling.steps.base import Batch, Edit, Step
from quire.sampling.steps.bias import LogitBias
from quire.sampling.steps.callables import Callables
from quire.sampling.steps.masks import AllowedIds, BadWords, MinTokens
from quire.sampling.steps.penalties import Penalties
from quire.sampling.steps.top_k_top_p import processed, sample


@dataclass(slots=True)
class Sampled:
    """What one sampling chose. Reading `errors` or logprobs waits for the device."""

    token_ids: Tensor  # [R] int64 on the device; nobody may write to it
    tops: Tensor  # [R] each row's best logit: not finite if the row is spoilt
    faults: dict[int, str] = field(default_factory=dict)
    scored: list[tuple[list[int], list[int], Scores]] = field(default_factory=list)
    listed: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def errors(self) -> dict[int, str]:
        """Row -> why its sequence must end. Its token means nothing."""
        finite = np.isfinite(self.tops.cpu().numpy())
        if finite.all():
            return self.faults
        words = {row: _spoilt(float(self.tops[row])) for row in np.flatnonzero(~finite).tolist()}
        return words | self.faults

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row -> logprobs, of the rows that asked."""
        found = dict(self.listed)
        for rows, counts, scores in self.scored:
            found.update(zip(rows, scores.lists(counts)))
        return found


def _spoilt(top: float) -> str:
    if top == -np.inf:
        return "no token is allowed: every logit is -inf"
    return f"the model's logits are not finite ({top})"


class Ask(NamedTuple):
    """The logprobs a slot wants."""

    k: int
    ids: tuple[int, ...] | None


@dataclass(slots=True)
class Recipe:
    """All that sampling one batch of slots needs, but its logits and positions."""

    slots: tuple[int, ...]
    edits: list[Edit]
    greedy: list[int]  # rows
    random: list[Cuts]
    shares: list[np.ndarray]  # slots of each group of random rows
    asks: dict[int, Ask]  # row -> what it wants
    scale: Tensor | None  # [R, 1] temperatures, if processors must see scaled logits

    @property
    def simple(self) -> bool:
        return not (self.edits or self.random or self.asks)


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
    ) -> None:
        """`processors`: engine-wide ones (quire.sampling.processors.load_processors)."""
        self.vocab = vocab
        self.device = torch.device(device)
        self._mode = logprobs_mode
        self._params: dict[int, SamplingParams] = {}
        self._processors = Processors(processors)
        self._steps: list[Step] = [
            AllowedIds(),
            BadWords(max_seqs, self.device),
            MinTokens(),
            LogitBias(),
            Penalties(vocab, max_seqs, self.device),
            Callables(),
            self._processors,
        ]
        self._scratch = Scratch(vocab, self.device, max_seqs)
        self._uniforms = Uniforms(max_seqs)
        self._recipe: Recipe | None = None

    def join(self, slot: int, seq: Seq) -> None:
        """A sequence takes a slot. Its tokens so far are all the history there is."""
        self._recipe = None
        self._params[slot] = seq.request.params
        self._uniforms.join(slot, seq.request.seed + seq.index)
        tokens = _known(seq)
        for step in self._steps:
            step.join(slot, seq, tokens)

    def leave(self, slot: int) -> None:
        """The slot is empty."""
        self._recipe = None
        self._params.pop(slot, None)
        for step in self._steps:
            step.leave(slot)

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Choose a token for each row.

        logits: [R, V], row i of slot slots[i]; float32 ones may be overwritten. positions[i]: how
        many outputs the sequence has already; with its seed it fixes the draw.
        """
        recipe = self._recipe_of(tuple(slots))
        if recipe.simple:
            return Sampled(*argmax(logits, self._scratch))
        return self._sample(logits, recipe, positions)

    def _sample(self, logits: Tensor, recipe: Recipe, positions: Sequence[int]) -> Sampled:
        faults: dict[int, str] = {}
        due = [edit for edit in recipe.edits if edit.due(positions)]
        raw = self._raw_rows(logits, recipe, bool(due))
        work = logits.float().contiguous() if due else logits
        for edit in due:
            edit.apply(work, positions, faults)
        if recipe.scale is not None:
            self._processors.run(self._processors.keeping, work.div_(recipe.scale), faults)
        ids, tops = self._choose(work, recipe, positions)
        for edit in recipe.edits:
            edit.drawn(ids)
        made = Sampled(ids, tops, faults)
        if recipe.asks:
            self._score(made, raw if raw is not None else self._processed(work, recipe), recipe)
        return made

    def _choose(
        self, work: Tensor, recipe: Recipe, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if not recipe.random:
            return argmax(work, self._scratch)
        draws = [self._draw(work, recipe, group, positions) for group in range(len(recipe.random))]
        if len(draws) == 1 and recipe.random[0].rows is None:
            return draws[0]
        ids = torch.empty(len(work), dtype=torch.int64, device=self.device)
        tops = torch.empty(len(work), device=self.device)
        if recipe.greedy:
            rows = torch.tensor(recipe.greedy, device=self.device)
            ids[rows], tops[rows] = argmax(work.index_select(0, rows), self._scratch)
        for cuts, (group_ids, group_tops) in zip(recipe.random, draws):
            ids[cuts.rows], tops[cuts.rows] = group_ids, group_tops
        return ids, tops

    def _draw(
        self, work: Tensor, recipe: Recipe, group: int, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        cuts = recipe.random[group]
        at = [positions[row] for row in cuts.numbers]
        shares = torch.from_numpy(self._uniforms.at(recipe.shares[group], at)).to(self.device)
        return sample(work, cuts, shares, self._scratch)

    # --- recipes ---

    def _recipe_of(self, slots: tuple[int, ...]) -> Recipe:
        if self._recipe is None or self._recipe.slots != slots:
            self._recipe = self._make_recipe(slots)
        return self._recipe

    def _make_recipe(self, slots: tuple[int, ...]) -> Recipe:
        batch = Batch(slots, self.vocab, self.device)
        edits = [edit for step in self._steps if (edit := step.edit(batch)) is not None]
        params = [self._params[slot] for slot in slots]
        scale = None
        if self._processors.keeping and not all(p.greedy for p in params):
            values = [1.0 if p.greedy else p.temperature for p in params]
            scale = torch.tensor(values, device=self.device)[:, None]
        plain: list[int] = []
        cut: list[int] = []
        for row, p in enumerate(params):
            if not p.greedy:
                (plain if _uncut(p) else cut).append(row)
        return Recipe(
            slots=slots,
            edits=edits,
            greedy=[row for row, p in enumerate(params) if p.greedy],
            random=[self._cuts(rows, params, scale is not None) for rows in (plain, cut) if rows],
            shares=[np.array([slots[r] for r in rows]) for rows in (plain, cut) if rows],
            asks={row: ask for row, p in enumerate(params) if (ask := _ask(p)) is not None},
            scale=scale,
        )

    def _cuts(self, rows: list[int], params: list[SamplingParams], scaled: bool) -> Cuts:
        chosen = [params[row] for row in rows]
        asked = [
            Cut(1.0 if scaled else p.temperature, p.min_p, _top_k(p, self.vocab), p.top_p)
            for p in chosen
        ]
        return make_cuts(rows, len(params), asked, self.device)

    # --- logprobs ---

    def _raw_rows(self, logits: Tensor, recipe: Recipe, changes: bool) -> Tensor | None:
        """The rows that asked, as the model gave them. None if they are not what is scored."""
        if not recipe.asks or self._mode.startswith("processed"):
            return None
        return self._rows(logits, list(recipe.asks), changes)

    def _rows(self, logits: Tensor, rows: list[int], copy: bool) -> Tensor:
        if len(rows) == len(logits):
            return logits.clone() if copy and logits.dtype == torch.float32 else logits
        return logits.index_select(0, torch.tensor(rows, device=self.device))

    def _processed(self, work: Tensor, recipe: Recipe) -> Tensor:
        """What the tokens of the asking rows were chosen from."""
        final = work.float().clone()
        for cuts in recipe.random:
            where = slice(None) if cuts.rows is None else cuts.rows
            final[where] = processed(work, cuts, self._scratch)
        return self._rows(final, list(recipe.asks), copy=False)

    def _score(self, made: Sampled, logits: Tensor, recipe: Recipe) -> None:
        """Rows with the same k are scored together, so that none pays for another's k."""
        as_logits = self._mode.endswith("_logits")
        groups: dict[int, list[int]] = {}
        for at, (row, ask) in enumerate(recipe.asks.items()):
            if ask.ids is None:
                groups.setdefault(ask.k, []).append(at)
                continue
            chosen = made.token_ids[row : row + 1]
            made.listed[row] = score_ids(
                logits[at : at + 1], chosen, ask.ids, as_logits=as_logits, scratch=self._scratch
            )
        asking = list(recipe.asks)
        for k, places in groups.items():
            rows = [asking[at] for at in places]
            x = self._rows(logits, places, copy=False)
            chosen = made.token_ids[torch.tensor(rows, device=self.device)]
            scores = score(x, chosen, k, self._scratch, as_logits=as_logits)
            made.scored.append((rows, [k] * len(rows), scores))


def _uncut(p: SamplingParams) -> bool:
    return p.top_k <= 0 and p.top_p >= 1 and p.min_p <= 0


def _top_k(p: SamplingParams, vocab: int) -> int:
    return 0 if p.top_k <= 0 or p.top_k >= vocab else p.top_k


def _ask(p: SamplingParams) -> Ask | None:
    if p.logprob_token_ids:
        return Ask(0, tuple(p.logprob_token_ids))
    return None if p.logprobs is None else Ask(p.logprobs, None)


def _known(seq: Seq) -> list[int]:
    """The tokens that are settled. An UNKNOWN is a draw to come, or one a preemption undid."""
    tokens = list(seq.tokens)  # at once: the scheduler may append meanwhile
    return tokens[: tokens.index(UNKNOWN)] if UNKNOWN in tokens else tokens
