"""Who of those in a step that raised is to blame: found by trying halves. Knows no scheduler.

    a step of A B C D raised        parties: [A B] [C D]
    A B passed                      parties: [C D]
    C D raised                      parties: [C] [D]
    C raised, alone and tried       C is to blame; parties: [D]
    D passed                        the inquiry is over

Each trial that raises leaves smaller parties, so it ends. Of two who only raise together nobody is
to blame: each passes. What a trial is, and when it has passed, quire.core.limits.suspects knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Party = tuple[str, ...]


@dataclass(slots=True)
class Inquiry:
    """parties: who is yet to be tried, and with whom; the first is on trial."""

    parties: deque[Party] = field(default_factory=deque)
    acquitted: int = 0  # inquiries that found nobody to blame
    _suspected: set[str] = field(default_factory=set)
    _blamed: bool = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspected

    @property
    def party(self) -> Party | None:
        """Who is on trial."""
        return self.parties[0] if self.parties else None

    def accuse(self, request_ids: Sequence[str], *, tried: bool = False) -> str | None:
        """A step of these raised. tried: that was their trial, though of no party of ours.

        Who is to blame, if that is known now: who was tried alone.
        """
        ids = tuple(dict.fromkeys(request_ids))
        if not ids:
            return None
        if self.party is not None and set(ids) <= set(self.party):
            tried = True
            self._put(_without(self.parties.popleft(), ids))
        if tried and len(ids) == 1:
            self._blamed = True
            self._suspected.discard(ids[0])
            self._close_if_over()
            return ids[0]
        half = len(ids) // 2
        self._put(ids[half:])
        self._put(ids[:half])
        return None

    def passed(self) -> None:
        """The party on trial is beyond what raised."""
        self._suspected.difference_update(self.parties.popleft())
        self._close_if_over()

    def gone(self, request_id: str) -> None:
        """It has ended: there is nothing left to try."""
        if request_id not in self._suspected:
            return
        self._suspected.discard(request_id)
        left = (_without(party, (request_id,)) for party in self.parties)
        self.parties = deque(party for party in left if party)
        self._close_if_over()

    def _put(self, party: Party) -> None:
        if party:
            self.parties.appendleft(party)
            self._suspected.update(party)

    def _close_if_over(self) -> None:
        if self.parties:
            return
        self.acquitted += not self._blamed
        self._blamed = False


def _without(party: Party, ids: Collection[str]) -> Party:
    return tuple(one for one in party if one not in ids)
