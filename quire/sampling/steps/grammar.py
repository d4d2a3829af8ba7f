"""Rows that are bound (quire.sampling.bound): their masks, and when their tokens become known.

A mask depends on every token before, so it is made on the host and late: the tokens of one sampling
are settled, which is taking them into the matchers, before the masks of the next are filled. The
forward pass between is in line or done by then. Whoever first needs a sampling's tokens settles it:
the next sampling, or the step's result; each is settled once, in order.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.core.types import Sequence as Seq
from quire.grammar.base import Matcher, Words
from quire.grammar.closing import FillAll
from quire.kernels.token_mask import token_mask
from quire.sampling.bound import Bound, End, Grammars

log = logging.getLogger(__name__)

Counts = list[int] | npt.NDArray[np.int32]
"""Outputs that each row has already."""

Tokens = tuple[Sequence[int], npt.NDArray[np.float32]]
"""Ids of all rows of a sampling, and their best logits."""

Work = list[tuple[Bound, int]]
"""Whose masks are wanted, and behind how many outputs."""

GRAIN = 32
"""Words: where masks begin in an upload, so that kernels find them aligned alike."""

FEW = 4
"""So many masks are filled sooner than a thread is woken."""

NOTHING = (
    "no token is allowed: of those that the structured output allows here, logit_bias, "
    "allowed_token_ids, bad_words or a logits processor leave none"
)


class Grammar:
    """The bound sequences by slot."""

    def __init__(self, vocab: int, device: torch.device, grammars: Grammars | None) -> None:
        self._width = -(-vocab // 32)
        self._last = np.int32((1 << vocab % 32) - 1 if vocab % 32 else -1)  # bits of the last word
        self._device = device
        self._grammars = grammars
        self._bound: dict[int, Bound] = {}
        self._slots: tuple[int, ...] = ()  # of the sampling before
        self._rows: list[tuple[int, Bound]] = []  # of those that are bound
        self._unsettled: deque[Binding] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._pid = 0

    def join(self, slot: int, seq: Seq, tokens: list[int]) -> None:
        """A sequence takes the slot. tokens: prompt and output so far, all known."""
        self.leave(slot)
        constraint = seq.request.constraint
        if constraint is None and seq.request.thinking is None:
            return
        ready = None
        if constraint is not None:
            assert self._grammars is not None, "a constraint in an engine without grammars"
            ready = self._grammars.get(constraint)
        self._bound[slot] = Bound.of(seq, ready, tokens)

    def leave(self, slot: int) -> None:
        """The slot is empty; unknown slots are ignored."""
        self._slots, self._rows = (), []
        self._bound.pop(slot, None)

    @property
    def busy(self) -> bool:
        """Some sequence is bound."""
        return bool(self._bound)

    def binding(
        self, slots: tuple[int, ...], positions: Counts, ventures: frozenset[int] = frozenset()
    ) -> Binding | None:
        """What a sampling of these slots is bound to; None: nothing. ventures: see Binding."""
        if not self._bound:
            return None
        if slots != self._slots:
            found = [(row, self._bound[s]) for row, s in enumerate(slots) if s in self._bound]
            self._slots, self._rows = slots, found
        if not self._rows:
            return None
        counts = positions if isinstance(positions, list) else positions.tolist()
        return Binding(self, [(row, bound, counts[row]) for row, bound in self._rows], ventures)

    def add(self, binding: Binding) -> None:
        """A sampling's tokens are on their way."""
        self._unsettled.append(binding)

    def mend(self) -> None:
        """A step raised half way: what was under way is over, and slots are joined anew."""
        self._slots, self._rows = (), []
        self._unsettled.clear()

    def settle(self, last: Binding | None = None) -> None:
        """Settle the samplings before, up to and with `last`."""
        while self._unsettled and (last is None or not last.settled):
            self._unsettled[0].take_in()
            self._unsettled.popleft()

    def masks(self, rows: list[int], work: Work) -> Packed:
        """The masks of these rows of the logits, in host memory that a device may read."""
        at = -(-len(rows) // GRAIN) * GRAIN
        size = at + len(rows) * self._width
        packed = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        array = packed.numpy()
        array[: len(rows)] = rows
        words = array[at:].reshape(len(rows), self._width)
        fill(work, words)
        words[:, -1] &= self._last
        return Packed(packed, at, packed[at:].view(len(rows), self._width), packed[: len(rows)])

    def beside(self, function: Callable[[], Packed | None]) -> Future[Packed | None]:
        """Run it in a thread; one at a time."""
        if self._thread is None or self._pid != os.getpid():  # a forked process has no threads
            self._thread, self._pid = ThreadPoolExecutor(1, "quire-masks"), os.getpid()
        return self._thread.submit(function)


class Packed(NamedTuple):
    """Masks for one upload: the rows they are for, and from `at` on the masks."""

    whole: Tensor
    at: int
    words: Tensor
    rows: Tensor

    def apply(self, logits: Tensor) -> None:
        """Send them where the logits are, and bar what they bar."""
        if logits.is_cpu:
            token_mask(logits, self.words, self.rows)
            return
        sent, count = self.whole.to(logits.device, non_blocking=True), len(self.rows)
        token_mask(logits, sent[self.at :].view(count, -1), sent[:count])


class Binding:
    """The bound rows of one sampling: masked, then told where the tokens are, then settled.

    ventures: rows that may draw first and ask then, while their budgets are far: most tokens that a
    model draws are allowed, and to take one in costs less than a mask of all. What refused() names
    is to be drawn again, under its mask: then all tokens are as likely as if masked at once.

    ends: row -> how its text ended with the token. errors: row -> why its sequence must end.
    refusals: the same, where its request is to blame.
    """

    def __init__(
        self,
        owner: Grammar,
        rows: list[tuple[int, Bound, int]],
        ventures: frozenset[int] = frozenset(),
    ) -> None:
        self._owner = owner
        self._rows = rows  # (row, bound, outputs before)
        self._ventures = ventures
        self._open: list[tuple[int, Bound, int]] = []  # rows that have no mask
        self._fetch: Callable[[], Tokens] | None = None
        self._filled: Future[Packed | None] | None = None
        self.masks = any(bound.wants(at) for _, bound, at in rows)
        self.settled = False
        self.ends: dict[int, End] = {}
        self.errors: dict[int, str] = {}
        self.refusals: dict[int, str] = {}

    def begin(self) -> None:
        """Fill the masks in a thread, where the tokens before are settled already."""
        if self.masks and len(self._rows) > FEW:
            self._filled = self._owner.beside(self._fill)

    def mask(self, logits: Tensor) -> None:
        """Bar what may not come next in logits [R, V], in place.

        Waits for the tokens of the samplings before; what the device has to do meanwhile should be
        in line already.
        """
        self._owner.settle()
        packed = self._fill() if self._filled is None else self._filled.result()
        if packed is not None:
            packed.apply(logits)

    def _fill(self) -> Packed | None:
        wanted = []
        for one in self._rows:
            row, bound, outputs = one
            if row in self._ventures and bound.free(outputs):
                self._open.append(one)
            elif bound.wants(outputs):
                wanted.append(one)
        return self._masks(wanted) if wanted else None

    def _masks(self, wanted: list[tuple[int, Bound, int]]) -> Packed:
        work = [(bound, at) for _, bound, at in wanted]
        return self._owner.masks([row for row, _, _ in wanted], work)

    def refused(self, ids: Tensor, tops: Tensor) -> Packed | None:
        """Masks of rows whose tokens may not come: they draw again. None: there are none."""
        if not self._open:
            return None
        drawn, finite = ids.tolist(), torch.isfinite(tops).tolist()
        refused = [
            one
            for one in self._open
            if not (finite[one[0]] and one[1].guarded(one[1].venture, drawn[one[0]]))
        ]
        return self._masks(refused) if refused else None

    def tell(self, fetch: Callable[[], Tokens]) -> None:
        """The sampling is in line. fetch: waits for its tokens."""
        self._fetch = fetch
        self._owner.add(self)

    def settle(self) -> None:
        """Take the tokens into the matchers, if nobody has."""
        self._owner.settle(self)

    def take_in(self) -> None:
        """Settle, now that it is its turn."""
        assert self._fetch is not None, "a sampling is settled that was not told of"
        ids, tops = self._fetch()
        self.settled, self._fetch = True, None
        best = tops.tolist()
        for row, bound, _ in self._rows:
            if not bound.over:
                self._take_in(row, bound, ids[row], best[row])

    def _take_in(self, row: int, bound: Bound, token: int, top: float) -> None:
        if isfinite(top) and not bound.failed:
            end = bound.guarded(bound.accept, token)
            if end is not None:
                self.ends[row] = end
            elif not bound.failed:
                return
        elif top == -inf and not bound.failed and self.masks:
            bound.refusal = NOTHING
        bound.over = True
        if bound.fault is not None:
            self.errors[row] = bound.fault
        elif bound.refusal is not None:
            self.refusals[row] = bound.refusal


def fill(work: Work, words: Words) -> None:
    """The masks of these sequences: words [n, W]."""
    groups: dict[FillAll, list[tuple[int, Matcher]]] = {}
    for i, (bound, _) in enumerate(work):
        if bound.guide is None or bound.fill_all is None:
            words[i] = -1
        else:
            groups.setdefault(bound.fill_all, []).append((i, bound.guide.matcher))
    for fill_all, matchers in groups.items():
        try:
            fill_all(matchers, words)
        except Exception:
            log.exception("masks are filled one by one: together they cannot be")
            _fill_each(work, words, fill_all)
    for i, (bound, outputs) in enumerate(work):
        if not bound.failed and not bound.free(outputs):
            bound.guarded(bound.narrow, words[i], outputs)


def _fill_each(work: Work, words: Words, fill_all: FillAll) -> None:
    """What raises is its own sequence's fault."""
    for i, (bound, _) in enumerate(work):
        if bound.guide is not None and bound.fill_all == fill_all:
            words[i] = -1
            bound.guarded(bound.guide.matcher.fill, words[i])
