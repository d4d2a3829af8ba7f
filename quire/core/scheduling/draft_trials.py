"""Draft trials: bounds what is lost by looking for drafts and verifying some that nothing promises.

Two accounts. Looks: sequences without accepted drafts that the scheduler may ask for some, which
costs the host as much as several rows of one token. Steps: what trials may still cost, in steps
without drafts; a step loses the time that it took longer and the rows that it left out, and wins
the tokens that were accepted. So wherever nothing is accepted, speculation costs LOSS_SHARE of the
steps, a few at the start, and one look for LOOKS_EVERY rows.
"""

from __future__ import annotations

LOOKS_EVERY = 64
"""Steps in which there are as many looks as rows; at least one in each step."""
LOOK_SHARE = 2
"""Looks are saved until there is one for so many rows, so that few steps have any."""
LOSS_SHARE = 0.01
"""Share of all steps that may be lost."""
MAX_SAVED, MAX_LOST = 2.0, 1.0
"""Steps that may be lost at once, and a loss that later steps have to make up for."""
WAIT_LOSS, UNKNOWN_LOSS = 0.1, 0.2
"""Assumed loss of a step that is planned only after the one before, and of one whose time cannot be
compared."""


class DraftTrials:
    """rows: of the step that is planned."""

    def __init__(self) -> None:
        self._rows = 1
        self._looks = 0.0
        self._saved = MAX_SAVED

    def begin_step(self, rows: int) -> None:
        """A step of so many rows is planned."""
        self._rows = max(rows, 1)
        self._looks = min(self._looks + max(rows / LOOKS_EVERY, 1.0), float(rows))
        self._saved = min(self._saved + LOSS_SHARE, MAX_SAVED)

    @property
    def allowed(self) -> bool:
        """Whether drafts may be verified to see if they pay."""
        return self._saved > 0

    @property
    def may_look(self) -> bool:
        """Whether a step may begin to look at sequences without accepted drafts."""
        return self._saved > 0 and self._looks * LOOK_SHARE >= self._rows

    def take_look(self) -> bool:
        """Count a look. Returns whether the step has more."""
        self._looks -= 1
        return self._looks >= 1

    def count_row(self, accepted: int, *, left_out: bool) -> None:
        """Count the accepted drafts of a row. left_out: the step behind it could not have a row of
        its sequence."""
        self._looks += accepted
        self._count((accepted - left_out) / self._rows)

    def count_step(self, seconds: float, plain: float, *, awaited: bool) -> None:
        """Count the time of a step with drafts. plain: of one without; 0: it is not known, or the
        two cannot be compared. awaited: the next one was planned after it."""
        longer = max(seconds / plain - 1, 0.0) if plain else UNKNOWN_LOSS
        self._count(-longer - WAIT_LOSS * awaited)

    def _count(self, steps: float) -> None:
        self._saved = max(self._saved + steps, -MAX_LOST)
