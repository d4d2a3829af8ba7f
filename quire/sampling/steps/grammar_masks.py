"""Grammar masks: masks the constrained rows of one sampling, and commits their tokens to the
matchers.

A mask depends on every token before, so it is made on the host and late: the tokens of one sampling
are committed to the matchers before the masks of the next are filled. The forward pass between is
enqueued or done by then. The next sampling, or the step's result, commits a sampling, whichever
comes first; each is committed once, in order.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf, isfinite
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.grammar.backends.base import MaskWords, Matcher
from quire.grammar.length_closing.budgeted_matcher import FillBitmasks
from quire.kernels.token_mask import token_mask
from quire.sampling.constrained_sequence import ConstrainedSequence, FinishKind, GrammarLookup
from quire.sampling.slot_join import SlotJoin

log = logging.getLogger(__name__)

OutputCounts = list[int] | npt.NDArray[np.int32]
"""Outputs that each row has already."""

TokensAndTopLogits = tuple[Sequence[int], npt.NDArray[np.float32]]
"""Ids of all rows of a sampling, and their best logits."""

MaskWork = list[tuple[ConstrainedSequence, int]]
"""Sequences that need masks, and after how many outputs."""

ALIGNMENT = 32
"""Words: where masks begin in an upload, so that they are aligned for the kernels."""

THREAD_MIN_ROWS = 4
"""Up to so many masks are filled sooner than a thread is woken."""

NO_TOKEN_ALLOWED = (
    "no token is allowed: of those that the structured output allows here, logit_bias, "
    "allowed_token_ids, bad_words or a logits processor leave none"
)


class ConstrainedSlots:
    """The constrained sequences by slot."""

    def __init__(self, vocab: int, device: torch.device, grammars: GrammarLookup | None) -> None:
        self._width = -(-vocab // 32)
        self._last_word_mask = np.int32(
            (1 << vocab % 32) - 1 if vocab % 32 else -1
        )  # bits of the last word
        self._device = device
        self._grammars = grammars
        self._by_slot: dict[int, ConstrainedSequence] = {}
        self._batch_slots: tuple[int, ...] = ()  # of the sampling before
        self._batch_rows: list[tuple[int, ConstrainedSequence]] = []  # of those that are bound
        self._uncommitted: deque[GrammarMasks] = deque()
        self._fill_pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def join(self, joined: SlotJoin) -> None:
        """A sequence takes the slot."""
        self.leave(joined.slot)
        constraint = joined.constraint
        if constraint is None and joined.thinking is None:
            return
        ready = None
        if constraint is not None:
            assert self._grammars is not None, "a constraint in an engine without grammars"
            ready = self._grammars.get(constraint)
        self._by_slot[joined.slot] = ConstrainedSequence.from_join(joined, ready)

    def leave(self, slot: int) -> None:
        """The slot is empty; unknown slots are ignored."""
        self._batch_slots, self._batch_rows = (), []
        self._by_slot.pop(slot, None)

    @property
    def has_constrained(self) -> bool:
        """Some sequence is constrained."""
        return bool(self._by_slot)

    def prepare_masks(
        self,
        slots: tuple[int, ...],
        positions: OutputCounts,
        optimistic_rows: frozenset[int] = frozenset(),
    ) -> GrammarMasks | None:
        """The masks of a sampling of these slots; None: no row is constrained."""
        if not self._by_slot:
            return None
        if slots != self._batch_slots:
            found = [(row, self._by_slot[s]) for row, s in enumerate(slots) if s in self._by_slot]
            self._batch_slots, self._batch_rows = slots, found
        if not self._batch_rows:
            return None
        counts = positions if isinstance(positions, list) else positions.tolist()
        return GrammarMasks(
            self, [(row, bound, counts[row]) for row, bound in self._batch_rows], optimistic_rows
        )

    def replace(self, slot: int, old: ConstrainedSequence, new: ConstrainedSequence) -> None:
        """A slot's sequence is in another state now. Without effect if it has left the slot."""
        if new is not old and self._by_slot.get(slot) is old:
            self._batch_slots, self._batch_rows = (), []
            self._by_slot[slot] = new

    def enqueue(self, masks: GrammarMasks) -> None:
        """Add a sampling with tokens in flight."""
        self._uncommitted.append(masks)

    def recover(self) -> None:
        """Drop the samplings in flight after a step raised; slots are joined again."""
        self._batch_slots, self._batch_rows = (), []
        self._uncommitted.clear()

    def commit_pending(self, last: GrammarMasks | None = None) -> None:
        """Commit the samplings before, up to and including `last`."""
        while self._uncommitted and (last is None or not last.committed):
            self._uncommitted[0].commit_now()
            self._uncommitted.popleft()

    def build_masks(self, rows: list[int], work: MaskWork) -> PackedMasks:
        """The masks of these rows of the logits, in host memory that a device may read."""
        at = -(-len(rows) // ALIGNMENT) * ALIGNMENT
        size = at + len(rows) * self._width
        packed = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        array = packed.numpy()
        array[: len(rows)] = rows
        words = array[at:].reshape(len(rows), self._width)
        fill_masks(work, words)
        words[:, -1] &= self._last_word_mask
        return PackedMasks(
            packed, at, packed[at:].view(len(rows), self._width), packed[: len(rows)]
        )

    def submit(self, function: Callable[[], PackedMasks | None]) -> Future[PackedMasks | None]:
        """Run it in a thread; one at a time."""
        if self._fill_pool is None or self._pid != os.getpid():  # a forked process has no threads
            self._fill_pool, self._pid = ThreadPoolExecutor(1, "quire-masks"), os.getpid()
        return self._fill_pool.submit(function)


class PackedMasks(NamedTuple):
    """Masks for one upload: the rows they are for, and from `at` on the masks."""

    upload: Tensor
    offset: int
    words: Tensor
    rows: Tensor

    @classmethod
    def of(cls, rows: Tensor, words: Tensor) -> PackedMasks:
        """Pack the masks of rows: int32 [n] and [n, W]."""
        count = len(rows)
        packed = torch.cat([rows, rows.new_zeros(-count % ALIGNMENT), words.reshape(-1)])
        offset = len(packed) - words.numel()
        return cls(packed, offset, packed[offset:].view(count, -1), packed[:count])

    def apply(self, logits: Tensor) -> None:
        """Copy them to the logits' device, and mask the logits [R, V] in place."""
        if logits.is_cpu:
            token_mask(logits, self.words, self.rows)
            return
        sent, count = self.upload.to(logits.device, non_blocking=True), len(self.rows)
        token_mask(logits, sent[self.offset :].view(count, -1), sent[:count])

    def of_rows(self, at: Sequence[int]) -> PackedMasks | None:
        """Return those of some rows, by their index in `at`; None: there are none."""
        places = {row: i for i, row in enumerate(at)}
        own = [i for i, row in enumerate(self.rows.tolist()) if row in places]
        if not own:
            return None
        rows = torch.tensor([places[row] for row in self.rows[own].tolist()], dtype=torch.int32)
        return PackedMasks.of(rows, self.words[own])

    def select(self, chosen: Tensor) -> PackedMasks | None:
        """Return those with True in chosen [n], for logits of the CPU; None: there are none."""
        words, rows = self.words[chosen], self.rows[chosen]
        return PackedMasks(self.upload, self.offset, words, rows) if len(rows) else None


class PlainMasks(msgspec.Struct, frozen=True, array_like=True):
    """Masks that another process has filled."""

    upload: Tensor
    offset: int
    count: int
    grammar_only: list[int]  # rows that a grammar alone constrains

    @classmethod
    def of(cls, samplings: Iterable[GrammarMasks]) -> PlainMasks | None:
        """Fill the masks of samplings of different rows; None: no row needs one."""
        filled: list[PackedMasks] = []
        only: list[int] = []
        for one in samplings:
            own = one.fill()
            filled += [] if own is None else [own]
            only += one.grammar_only_rows()
        if not filled:
            return None
        packed = filled[0]
        if len(filled) > 1:
            rows = torch.cat([one.rows for one in filled])
            packed = PackedMasks.of(rows, torch.cat([one.words for one in filled]))
        return cls(packed.upload, packed.offset, len(packed.rows), only)

    def unpack(self, at: Sequence[int] | None = None) -> PackedMasks | None:
        """at: the rows of a sampling; None: all. Returns None if it has no masks."""
        words = self.upload[self.offset :].view(self.count, -1)
        packed = PackedMasks(self.upload, self.offset, words, self.upload[: self.count])
        return packed if at is None else packed.of_rows(at)


class GrammarMasks:
    """The constrained rows of one sampling: apply_masks, then set_fetch, then commit_tokens.

    optimistic_rows: rows that may draw before they are masked, while their budgets are far: most
    tokens that a model draws are allowed, and to accept one costs less than a mask of all. Rows
    that rejected() returns are drawn again, under their masks: then all tokens are as likely as if
    masked at once.

    ends: row -> how its text ended with the token. errors: row -> why its sequence must end.
    refusals: the same, if its request is at fault.
    """

    def __init__(
        self,
        owner: ConstrainedSlots,
        rows: list[tuple[int, ConstrainedSequence, int]],
        optimistic_rows: frozenset[int] = frozenset(),
    ) -> None:
        self._slots_state = owner
        self._rows = rows  # (row, bound, outputs before)
        self._optimistic_rows = optimistic_rows
        self._unmasked_rows: list[
            tuple[int, ConstrainedSequence, int]
        ] = []  # rows that have no mask
        self._masked_rows: set[int] = set()
        self.sequences = {row: bound for row, bound, _ in rows}
        self._fetch: Callable[[], TokensAndTopLogits] | None = None
        self._pending_fill: Future[PackedMasks | None] | None = None
        self.needs_masks = any(bound.needs_mask(at) for _, bound, at in rows)
        self.committed = False
        self.ends: dict[int, FinishKind] = {}
        self.errors: dict[int, str] = {}
        self.refusals: dict[int, str] = {}

    def start_fill(self) -> None:
        """Fill the masks in a thread, if the tokens before are committed already."""
        if self.needs_masks and len(self._rows) > THREAD_MIN_ROWS:
            self._pending_fill = self._slots_state.submit(self.fill)

    def apply_masks(self, logits: Tensor) -> None:
        """Mask logits [R, V] in place.

        Waits for the tokens of the samplings before: enqueue the device's other work first.
        """
        self._slots_state.commit_pending()
        packed = self.fill() if self._pending_fill is None else self._pending_fill.result()
        if packed is not None:
            packed.apply(logits)

    def fill(self) -> PackedMasks | None:
        """Return the masks; None: no row needs one. The tokens before must be committed."""
        wanted = []
        for one in self._rows:
            row, bound, outputs = one
            if row in self._optimistic_rows and bound.is_grammar_only(outputs):
                self._unmasked_rows.append(one)
            elif bound.needs_mask(outputs):
                wanted.append(one)
        return self._build_masks(wanted) if wanted else None

    def grammar_only_rows(self) -> list[int]:
        return [row for row, bound, outputs in self._rows if bound.is_grammar_only(outputs)]

    def _build_masks(self, wanted: list[tuple[int, ConstrainedSequence, int]]) -> PackedMasks:
        work, rows = [(bound, at) for _, bound, at in wanted], [row for row, _, _ in wanted]
        self._masked_rows.update(rows)
        return self._slots_state.build_masks(rows, work)

    def rejected(self, ids: Tensor, tops: Tensor) -> PackedMasks | None:
        """Masks of rows with tokens that are not allowed: they draw again. None: there are none."""
        if not self._unmasked_rows:
            return None
        drawn, finite = ids.tolist(), torch.isfinite(tops).tolist()
        rejected = [
            one
            for one in self._unmasked_rows
            if not (finite[one[0]] and one[1].run_guarded(one[1].accept_ahead, drawn[one[0]]))
        ]
        return self._build_masks(rejected) if rejected else None

    def set_fetch(self, fetch: Callable[[], TokensAndTopLogits]) -> None:
        """Set how to fetch the tokens of the enqueued sampling. fetch: waits for them."""
        self._fetch = fetch
        self._slots_state.enqueue(self)

    @property
    def over(self) -> set[int]:
        """Rows that end their sequences."""
        return {*self.ends, *self.errors, *self.refusals}

    def before(self, drafts: Sequence[int]) -> GrammarMasks:
        """Return those of the first row of each sequence. drafts: as for behind()."""
        rows = [one for one in self._rows if one[0] == 0 or drafts[one[0] - 1] < 0]
        return GrammarMasks(self._slots_state, rows)

    def behind(self, drafts: Sequence[int]) -> GrammarMasks | None:
        """Return those of the next row of each sequence, behind the draft of its row here, as far
        as the grammar allows that; None: of no sequence. The masks here are filled already.

        drafts: of each row of the step; negative: none.
        """
        rows = []
        for row, bound, outputs in self._rows:
            if drafts[row] >= 0 and not bound.failed and not bound.finished:
                ahead = bound.copy()
                if ahead.run_guarded(ahead.accept, drafts[row]) is None and not ahead.failed:
                    rows.append((row + 1, ahead, outputs + 1))
        return GrammarMasks(self._slots_state, rows) if rows else None

    def commit_tokens(self) -> None:
        """Commit the tokens to the matchers, if that is not done."""
        self._slots_state.commit_pending(self)

    def commit_now(self) -> None:
        """Commit, after all samplings before."""
        assert self._fetch is not None, "a sampling is committed before set_fetch()"
        ids, tops = self._fetch()
        self.committed, self._fetch = True, None
        best = tops.tolist()
        for row, bound, _ in self._rows:
            if not bound.finished:
                self._commit_row(row, bound, ids[row], best[row])

    def _commit_row(self, row: int, bound: ConstrainedSequence, token: int, top: float) -> None:
        if isfinite(top) and not bound.failed:
            end = bound.run_guarded(bound.accept, token)
            if end is not None:
                self.ends[row] = end
            elif not bound.failed:
                return
        elif top == -inf and not bound.failed and row in self._masked_rows:
            bound.refusal = NO_TOKEN_ALLOWED
        bound.finished = True
        if bound.error is not None:
            self.errors[row] = bound.error
        elif bound.refusal is not None:
            self.refusals[row] = bound.refusal


class ReceivedMasks(GrammarMasks):
    """Masks that were filled in another process, which commits the tokens."""

    def __init__(
        self, owner: ConstrainedSlots, packed: PackedMasks, drawn_first: frozenset[int]
    ) -> None:
        super().__init__(owner, [])
        self._packed = packed
        self._drawn_first = drawn_first
        self.needs_masks = True

    def apply_masks(self, logits: Tensor) -> None:
        packed: PackedMasks | None = self._packed
        if self._drawn_first:
            rows = self._packed.rows.tolist()
            packed = self._packed.select(torch.tensor([i not in self._drawn_first for i in rows]))
        if packed is not None:
            packed.apply(logits)

    def rejected(self, ids: Tensor, tops: Tensor) -> PackedMasks | None:
        if not self._drawn_first:
            return None
        rows, words = self._packed.rows.long(), self._packed.words
        drawn = ids[rows].long()
        own = words.gather(1, (drawn >> 5)[:, None])[:, 0]
        allowed = (own >> (drawn & 31) & 1).bool() & torch.isfinite(tops[rows])
        first = torch.tensor([i in self._drawn_first for i in rows.tolist()])
        return self._packed.select(first & ~allowed)

    def commit_now(self) -> None:
        """Refuse rows that have no token left."""
        assert self._fetch is not None, "a sampling is committed before set_fetch()"
        _, tops = self._fetch()
        self.committed, self._fetch = True, None
        for row in self._packed.rows.tolist():
            if tops[row] == -inf:
                self.refusals[row] = NO_TOKEN_ALLOWED


def fill_masks(work: MaskWork, words: MaskWords) -> None:
    """The masks of these sequences: words [n, W]."""
    groups: dict[FillBitmasks, list[tuple[int, Matcher]]] = {}
    for i, (bound, _) in enumerate(work):
        if bound.guide is None or bound.fill_all is None:
            words[i] = -1
        else:
            groups.setdefault(bound.fill_all, []).append((i, bound.guide.matcher))
    for fill_all, matchers in groups.items():
        try:
            fill_all(matchers, words)
        except Exception:
            log.exception("masks cannot be filled together: they are filled one by one")
            _fill_one_by_one(work, words, fill_all)
    for i, (bound, outputs) in enumerate(work):
        if not bound.failed and not bound.is_grammar_only(outputs):
            bound.run_guarded(bound.narrow_mask, words[i], outputs)


def _fill_one_by_one(work: MaskWork, words: MaskWords, fill_all: FillBitmasks) -> None:
    """An exception ends only its own sequence."""
    for i, (bound, _) in enumerate(work):
        if bound.guide is not None and bound.fill_all == fill_all:
            words[i] = -1
            bound.run_guarded(bound.guide.matcher.fill_bitmask, words[i])
