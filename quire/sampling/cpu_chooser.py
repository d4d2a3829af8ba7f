"""CPU chooser: chooses tokens through numpy, random rows in two groups, unfiltered and filtered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.params import SamplingParams
from quire.sampling import numpy_ops
from quire.sampling.philox import Uniforms
from quire.sampling.row_ops import ScratchBuffers, argmax_rows
from quire.sampling.steps.base import SlotBatch
from quire.sampling.steps.grammar_masks import PackedMasks
from quire.sampling.steps.top_k_top_p import processed_logits, sample_rows
from quire.sampling.top_k_top_p_batch import TopKTopPBatch, TopKTopPParams, build_top_k_top_p_batch
from quire.sampling.vocab_strips import VocabStrips


@dataclass(slots=True)
class CpuChooserRows:
    """The rows of a batch by how they choose."""

    greedy: list[int]
    random: list[TopKTopPBatch]
    slots: list[np.ndarray]  # of each group of random rows
    all_slots: np.ndarray
    temperatures: list[float]  # 0: greedy

    @property
    def needs_all_logits(self) -> bool:
        """Some row is filtered, by the logits of all tokens."""
        return not all(group.is_unfiltered for group in self.random)


class CpuChooser:
    """The TokenChooser of tensors on the CPU."""

    def __init__(self, vocab: int, max_seqs: int) -> None:
        self.scratch = ScratchBuffers(vocab, max_seqs)
        self._vocab = vocab
        self._draw_uniforms = Uniforms(max_seqs)
        self._redraw_uniforms = Uniforms(max_seqs, draw=1)

    def join(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes the slot."""
        self._draw_uniforms.join(slot, seed)
        self._redraw_uniforms.join(slot, seed)

    def prepare_rows(
        self, batch: SlotBatch, params: list[SamplingParams], scaled: bool
    ) -> CpuChooserRows:
        """Prepare a batch."""
        plain: list[int] = []
        cut: list[int] = []
        for row, p in enumerate(params):
            if not p.greedy:
                (plain if _is_unfiltered(p) else cut).append(row)
        return CpuChooserRows(
            greedy=[row for row, p in enumerate(params) if p.greedy],
            random=[self._build_batch(rows, params, scaled) for rows in (plain, cut) if rows],
            slots=[np.array([batch.slots[r] for r in rows]) for rows in (plain, cut) if rows],
            all_slots=np.array(batch.slots),
            temperatures=[0.0 if p.greedy else p.temperature for p in params],
        )

    def can_draw_before_mask(self, params: SamplingParams) -> bool:
        """Whether a row may draw before it is masked, and redraw_masked() if needed."""
        return params.greedy or _is_unfiltered(params)

    def _build_batch(
        self, rows: list[int], params: list[SamplingParams], scaled: bool
    ) -> TopKTopPBatch:
        chosen = [params[row] for row in rows]
        asked = [
            TopKTopPParams(
                1.0 if scaled else p.temperature, p.min_p, _effective_top_k(p, self._vocab), p.top_p
            )
            for p in chosen
        ]
        return build_top_k_top_p_batch(rows, len(params), asked, torch.device("cpu"))

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Every row takes its greatest logit."""
        return argmax_rows(logits, self.scratch)

    def choose(
        self, logits: Tensor, rows: CpuChooserRows, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, None]:
        """Choose for greedy rows and for each group of random ones separately."""
        if not rows.random:
            return *argmax_rows(logits, self.scratch), None
        draws = [self._draw(logits, rows, group, positions) for group in range(len(rows.random))]
        if len(draws) == 1 and rows.random[0].device_rows is None:
            return *draws[0], None
        ids = torch.empty(len(logits), dtype=torch.int64)
        tops = torch.empty(len(logits))
        if rows.greedy:
            at = torch.tensor(rows.greedy)
            ids[at], tops[at] = argmax_rows(logits.index_select(0, at), self.scratch)
        for cuts, (group_ids, group_tops) in zip(rows.random, draws):
            ids[cuts.device_rows], tops[cuts.device_rows] = group_ids, group_tops
        return ids, tops, None

    def choose_from_strips(
        self, strip: Tensor, rows: CpuChooserRows, positions: Sequence[int], strips: VocabStrips
    ) -> tuple[Tensor, Tensor]:
        """As choose(), of rows that are not filtered, by this rank's strip of the logits."""
        ids, tops = strips.argmax(strip)
        for group, cuts in enumerate(rows.random):
            at = torch.tensor(cuts.row_indices)
            ids[at] = strips.draw(strip, tops, cuts, self._shares(rows, group, positions))
        return ids, tops

    def redraw_masked(
        self, logits: Tensor, rows: CpuChooserRows, positions: Sequence[int], masks: PackedMasks
    ) -> tuple[Tensor, Tensor]:
        """Ids and best logits of the rows that the masks are for. Logits stay as they are."""
        at = masks.rows.tolist()
        shares = self._redraw_uniforms.draw(rows.all_slots[at], [positions[row] for row in at])
        found = numpy_ops.draw_allowed(
            logits.index_select(0, masks.rows).float().numpy(),
            masks.words.numpy(),
            [rows.temperatures[row] for row in at],
            shares.tolist(),
        )
        return torch.tensor([one[0] for one in found]), torch.tensor([one[1] for one in found])

    def _draw(
        self, logits: Tensor, rows: CpuChooserRows, group: int, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        shares = self._shares(rows, group, positions)
        return sample_rows(logits, rows.random[group], shares, self.scratch)

    def _shares(self, rows: CpuChooserRows, group: int, positions: Sequence[int]) -> Tensor:
        at = [positions[row] for row in rows.random[group].row_indices]
        return torch.from_numpy(self._draw_uniforms.draw(rows.slots[group], at))

    def processed(self, logits: Tensor, rows: CpuChooserRows, choice: None) -> Tensor:
        """Filter once more: the draw did not keep which tokens it had."""
        final = logits.float().clone()
        for cuts in rows.random:
            where = slice(None) if cuts.device_rows is None else cuts.device_rows
            final[where] = processed_logits(logits, cuts, self.scratch)
        return final


def _is_unfiltered(p: SamplingParams) -> bool:
    return p.top_k <= 0 and p.top_p >= 1 and p.min_p <= 0


def _effective_top_k(p: SamplingParams, vocab: int) -> int:
    return 0 if p.top_k <= 0 or p.top_k >= vocab else p.top_k
