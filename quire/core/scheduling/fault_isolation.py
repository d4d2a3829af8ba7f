"""Fault bisection: finds the request that makes steps raise, by bisection.

    a step of A B C D raised        groups: [A B] [C D]
    A B passed                      groups: [C D]
    C D raised                      groups: [C] [D]
    C raised, tried alone           C is the culprit; groups: [D]
    D passed                        the bisection is over

Each trial that raises leaves smaller groups, so it ends. If two requests only raise together,
neither is a culprit: each passes. quire.core.scheduling.limits.isolation_limit runs the trials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

TrialGroup = tuple[str, ...]


@dataclass(slots=True)
class FaultBisection:
    """trial_groups: requests that are tried together; the first group is on trial."""

    trial_groups: deque[TrialGroup] = field(default_factory=deque)
    unattributed_failures: int = 0  # bisections without a culprit
    _suspects: set[str] = field(default_factory=set)
    _found_culprit: bool = False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects

    @property
    def current_group(self) -> TrialGroup | None:
        """The group of requests on trial."""
        return self.trial_groups[0] if self.trial_groups else None

    def record_failure(self, request_ids: Sequence[str], *, tried: bool = False) -> str | None:
        """Record that a step of these raised. tried: it was a trial, though of no group here.

        Returns the id of the culprit if it is known: a request that was tried alone.
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
        """Record that the group on trial passed the step that raised."""
        self._suspects.difference_update(self.trial_groups.popleft())
        self._finish_if_done()

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended."""
        if request_id not in self._suspects:
            return
        self._suspects.discard(request_id)
        left = (_without(group, (request_id,)) for group in self.trial_groups)
        self.trial_groups = deque(group for group in left if group)
        self._finish_if_done()

    def _push_group(self, group: TrialGroup) -> None:
        if group:
            self.trial_groups.appendleft(group)
            self._suspects.update(group)

    def _finish_if_done(self) -> None:
        if self.trial_groups:
            return
        self.unattributed_failures += not self._found_culprit
        self._found_culprit = False


def _without(group: TrialGroup, ids: Collection[str]) -> TrialGroup:
    return tuple(request_id for request_id in group if request_id not in ids)
