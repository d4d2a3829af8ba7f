"""Fault bisection: finds the request with which steps raise, by trying halves.

    a step of A B C D raised        groups: [A B] [C D]
    A B passed                      groups: [C D]
    C D raised                      groups: [C] [D]
    C raised, tried alone           C is the culprit; groups: [D]
    D passed                        the bisection is over

Each trial that raises leaves smaller groups, so it ends. Of two requests that only raise together
neither is a culprit: each passes. quire.core.scheduling.limits.isolation_limit runs the trials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

TrialGroup = tuple[str, ...]


@dataclass(slots=True)
class FaultBisection:
    """parties: who is yet to be tried, and with whom; the first is on trial."""

    trial_groups: deque[TrialGroup] = field(default_factory=deque)
    unattributed_failures: int = 0  # inquiries that found nobody to blame
    _suspects: set[str] = field(default_factory=set)
    _found_culprit: bool = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects

    @property
    def current_group(self) -> TrialGroup | None:
        """Who is on trial."""
        return self.trial_groups[0] if self.trial_groups else None

    def record_failure(self, request_ids: Sequence[str], *, tried: bool = False) -> str | None:
        """A step of these raised. tried: that was their trial, though of no party of ours.

        Who is to blame, if that is known now: who was tried alone.
        """
        ids = tuple(dict.fromkeys(request_ids))
        if not ids:
            return None
        if self.current_group is not None and set(ids) <= set(self.current_group):
            tried = True
            self._push_group(_without(self.trial_groups.popleft(), ids))
        if tried and len(ids) == 1:
            self._found_culprit = True
            self._suspects.discard(ids[0])
            self._finish_if_done()
            return ids[0]
        half = len(ids) // 2
        self._push_group(ids[half:])
        self._push_group(ids[:half])
        return None

    def record_success(self) -> None:
        """The party on trial is beyond what raised."""
        self._suspects.difference_update(self.trial_groups.popleft())
        self._finish_if_done()

    def remove(self, request_id: str) -> None:
        """It has ended: there is nothing left to try."""
        if request_id not in self._suspects:
            return
        self._suspects.discard(request_id)
        left = (_without(party, (request_id,)) for party in self.trial_groups)
        self.trial_groups = deque(party for party in left if party)
        self._finish_if_done()

    def _push_group(self, party: TrialGroup) -> None:
        if party:
            self.trial_groups.appendleft(party)
            self._suspects.update(party)

    def _finish_if_done(self) -> None:
        if self.trial_groups:
            return
        self.unattributed_failures += not self._found_culprit
        self._found_culprit = False


def _without(party: TrialGroup, ids: Collection[str]) -> TrialGroup:
    return tuple(one for one in party if one not in ids)
