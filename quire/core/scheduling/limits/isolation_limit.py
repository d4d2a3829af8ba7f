"""Fault isolation limit: runs each suspected request apart until it passes the step that failed.

There are two kinds of suspects. Requests of a step that raised are tried in groups, halves of
halves (quire.core.scheduling.fault_isolation). Requests that ran in an engine that died are marked,
and each is tried alone: a second death then has one culprit. During a trial no other request has
a row in the step, and no step is in flight behind it (`serialize_steps`). Others wait with their
blocks; if no suspect can run for want of blocks, the unsuspected ones make the next step.

A trial is over when every sequence has computed what was planned for it when the step raised, or
its first few tokens, which covers what the dead engine had generated and not delivered.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.core.scheduling.fault_isolation import FaultBisection
from quire.core.scheduling.limits.base import NO_BOUND, Admission, StepBudget, StepListener
from quire.core.types import Request, Sequence, SequenceState

TRIAL_STEPS = 3
"""Steps with tokens in which a crash suspect runs alone. At most so many were in flight."""


class FaultIsolationLimit(StepBudget, Admission, StepListener):
    """One per engine, before all other limits."""

    allows_overtaking = True

    def __init__(self) -> None:
        self._bisection = FaultBisection()
        self._crash_suspects: dict[
            str, None
        ] = {}  # requests that ran during a crash and are not tried yet
        self._solo_suspect: str | None = None  # the crash suspect on trial
        self._goal_lengths: dict[Sequence, int] = {}  # length at which a suspect has passed
        self._is_trial_step = False  # this step is a trial
        self._rows = 0  # of this step
        self._chose_solo_suspect = False  # this step has chosen the suspect
        self._new_goals: set[Sequence] = set()  # got their goals in this step

    @property
    def serialize_steps(self) -> bool:  # type: ignore[override]  # read only
        return bool(self._crash_suspects) or self._bisection.current_group is not None

    @property
    def unattributed_failures(self) -> int:  # type: ignore[override]  # read only
        return self._bisection.unattributed_failures

    # -- suspects -----------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.engine_crashes:
            self._crash_suspects[request.id] = None

    def observe_step_failure(self, rows: Seq[Sequence]) -> str | None:
        ids = [seq.request.id for seq in rows]
        for seq in rows:
            self._goal_lengths[seq] = max(seq.planned, self._goal_lengths.get(seq, 0))
        alone = self._solo_suspect is not None and set(ids) == {self._solo_suspect}
        return self._bisection.record_failure(ids, tried=alone)

    def remove_request(self, request: Request) -> None:
        if not self.serialize_steps:
            return
        self._bisection.remove(request.id)
        self._clear(request.id)

    def _clear(self, request_id: str) -> None:
        self._crash_suspects.pop(request_id, None)
        if self._solo_suspect == request_id:
            self._solo_suspect = None
        for seq in [seq for seq in self._goal_lengths if seq.request.id == request_id]:
            del self._goal_lengths[seq]

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, sequences: int) -> None:
        if not self.serialize_steps:
            self._is_trial_step, self._rows = False, 0
            return
        self._clear_passed()
        no_suspect_ran = self._is_trial_step and not self._rows
        self._is_trial_step = self.serialize_steps and not no_suspect_ran
        self._rows, self._chose_solo_suspect = 0, False
        self._new_goals.clear()

    def _clear_passed(self) -> None:
        """Clear the suspects on trial if all their sequences have passed."""
        group = self._bisection.current_group
        on_trial = group or (() if self._solo_suspect is None else (self._solo_suspect,))
        goals = [(seq, at) for seq, at in self._goal_lengths.items() if seq.request.id in on_trial]
        if not goals or any(
            seq.computed < at for seq, at in goals if seq.state is not SequenceState.FINISHED
        ):
            return
        if group is not None:
            self._bisection.record_success()
        for request_id in on_trial:
            self._clear(request_id)

    def allow(self, seq: Sequence, want: int) -> int:
        if not self.serialize_steps:
            return want
        name = seq.request.id
        if not self._is_trial_step:
            suspected = name in self._crash_suspects or name in self._bisection
            return 0 if suspected else want
        if self._bisection.current_group is not None:
            return want if name in self._bisection.current_group else 0
        suspect = self._solo_suspect
        return want if name == suspect or (suspect is None and name in self._crash_suspects) else 0

    def take(self, seq: Sequence, n: int) -> None:
        self._rows += 1
        if not self._is_trial_step or self._bisection.current_group is not None:
            return
        if self._solo_suspect is None:
            self._solo_suspect, self._chose_solo_suspect = seq.request.id, True
        if seq not in self._goal_lengths:
            self._goal_lengths[seq] = seq.generation_start + TRIAL_STEPS - 1
            self._new_goals.add(seq)

    def undo(self, seq: Sequence, n: int) -> None:
        self._rows -= 1
        if seq in self._new_goals:
            self._new_goals.discard(seq)
            del self._goal_lengths[seq]
        if self._chose_solo_suspect and not self._rows:
            self._solo_suspect, self._chose_solo_suspect = None, False

    def free_decode_rows(self) -> int:
        return 0 if self.serialize_steps else NO_BOUND

    def take_decode_rows(self, rows: int) -> None:
        self._rows += rows
