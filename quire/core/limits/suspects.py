"""Who may have broken an engine runs apart from all others until it has passed where that broke.

Two kinds. Requests of a step that raised are tried in parties, halves of halves
(quire.core.suspects). Requests that were aboard an engine that died come marked, and each is tried
alone: a second death then has one culprit. On trial means: nobody else has a row in the step, and
no step is in line behind it (`careful`). Who is not on trial waits, with its blocks; if nobody of
the party can run for want of room, those who are suspected of nothing make the next step.

A trial is over when every sequence has computed what it had been promised when the step raised, or
its first few tokens: what the dead engine had said of them and nobody was told is behind it then.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.limits.base import NO_BOUND, Limit
from quire.core.suspects import Inquiry
from quire.core.types import Request, Sequence, State

FEW = 3
"""Steps in which one that was aboard a death says tokens alone. At most so many were in line."""


class Suspects(Limit):
    """An engine has one, before all other limits."""

    passing = True

    def __init__(self) -> None:
        self._inquiry = Inquiry()
        self._marked: dict[str, None] = {}  # were aboard a death, and are not tried yet
        self._alone: str | None = None  # of those, who is on trial
        self._goals: dict[Sequence, int] = {}  # when a suspect has passed
        self._trial = False  # this step is one
        self._rows = 0  # of this step
        self._chosen = False  # this step has chosen who is on trial alone
        self._begun: set[Sequence] = set()  # have got their goals in this step

    @property
    def careful(self) -> bool:  # type: ignore[override]  # read only
        return bool(self._marked) or self._inquiry.party is not None

    @property
    def acquitted(self) -> int:  # type: ignore[override]  # read only
        return self._inquiry.acquitted

    # -- who is suspected ---------------------------------------------------------------------

    def keeps(self, request: Request) -> bool:
        if request.suspect:
            self._marked[request.id] = None
        return False

    def failed(self, rows: Seq[Sequence]) -> str | None:
        ids = [seq.request.id for seq in rows]
        for seq in rows:
            self._goals[seq] = max(seq.planned, self._goals.get(seq, 0))
        alone = self._alone is not None and set(ids) == {self._alone}
        return self._inquiry.accuse(ids, tried=alone)

    def forget(self, request: Request) -> None:
        if not self.careful:
            return
        self._inquiry.gone(request.id)
        self._acquit(request.id)

    def _acquit(self, request_id: str) -> None:
        self._marked.pop(request_id, None)
        if self._alone == request_id:
            self._alone = None
        for seq in [seq for seq in self._goals if seq.request.id == request_id]:
            del self._goals[seq]

    # -- steps --------------------------------------------------------------------------------

    def begin(self, sequences: int) -> None:
        if not self.careful:
            self._trial, self._rows = False, 0
            return
        self._close()
        nobody_could = self._trial and not self._rows
        self._trial = self.careful and not nobody_could
        self._rows, self._chosen = 0, False
        self._begun.clear()

    def _close(self) -> None:
        """Acquit who has passed."""
        party = self._inquiry.party
        on_trial = party or (() if self._alone is None else (self._alone,))
        goals = [(seq, at) for seq, at in self._goals.items() if seq.request.id in on_trial]
        if not goals or any(
            seq.computed < at for seq, at in goals if seq.state is not State.FINISHED
        ):
            return
        if party is not None:
            self._inquiry.passed()
        for request_id in on_trial:
            self._acquit(request_id)

    def allow(self, seq: Sequence, want: int) -> int:
        if not self.careful:
            return want
        name = seq.request.id
        if not self._trial:
            suspected = name in self._marked or name in self._inquiry
            return 0 if suspected else want
        if self._inquiry.party is not None:
            return want if name in self._inquiry.party else 0
        one = self._alone
        return want if name == one or (one is None and name in self._marked) else 0

    def take(self, seq: Sequence, n: int) -> None:
        self._rows += 1
        if not self._trial or self._inquiry.party is not None:
            return
        if self._alone is None:
            self._alone, self._chosen = seq.request.id, True
        if seq not in self._goals:
            self._goals[seq] = seq.first + FEW - 1
            self._begun.add(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self._rows -= 1
        if seq in self._begun:
            self._begun.discard(seq)
            del self._goals[seq]
        if self._chosen and not self._rows:
            self._alone, self._chosen = None, False

    def slack(self) -> int:
        return 0 if self.careful else NO_BOUND

    def take_ones(self, rows: int) -> None:
        self._rows += rows
