"""Draft trials: bounds what is lost by looking for drafts and verifying some that do not pay.

Two accounts. Looks: sequences without accepted drafts that the scheduler may ask for some, which
costs the host as much as several rows of one token. Steps: what drafts may still cost, in steps
without any, whatever they promise. A step with drafts loses the time that it took longer, and so
does the one behind it if it was planned only then; rows that are left out are lost, and accepted
tokens are won. So wherever drafts do not pay, speculation costs LOSS_SHARE of the steps, a few at
the start, and one look for LOOKS_EVERY rows.
"""

from __future__ import annotations

LOOKS_EVERY = 64
"""Steps in which there are as many looks as rows; at least one in each step."""
LOOK_SHARE = 2
"""Looks are saved until there is one for so many rows, so that few steps have any."""
LOSS_SHARE = 0.01
"""Share of all steps that may be lost."""
FIRST_SAVED, MAX_SAVED, MAX_WON, MAX_LOST = 2.0, 1.0, 16.0, 4.0
"""Steps that may be lost at once: at first, later, and where drafts have won as many; and a loss
that later steps have to make up for."""
MOST_LONGER = 4.0
"""Loss of one step, at most: a pause of the machine is not the cost of drafts."""
FIRST_LOSS, LOSS_RATE = 0.2, 0.125
"""Assumed loss of a step that cannot be compared: at first, and how fast it follows others."""


class DraftTrials:
    """rows: of the step that is planned."""

    def __init__(self) -> None:
        self._rows = 1
        self._looks = 0.0
        self._saved = FIRST_SAVED
        self._mean_loss = FIRST_LOSS

    def begin_step(self, rows: int) -> None:
        """A step of so many rows is planned."""
        self._rows = max(rows, 1)
        self._looks = min(self._looks + max(rows / LOOKS_EVERY, 1.0), float(rows))
        if self._saved < MAX_SAVED:
            self._saved += LOSS_SHARE

    @property
    def allowed(self) -> bool:
        """Whether a step may have drafts."""
        return self._saved > 0

    @property
    def may_look(self) -> bool:
        """Whether a step may begin to look at sequences without accepted drafts."""
        return self.allowed and self._looks * LOOK_SHARE >= self._rows

    def take_look(self) -> bool:
        """Count a look. Returns whether the step has more."""
        self._looks -= 1
        return self._looks >= 1

    def count_rows(self, rows: int, accepted: int, *, left_out: bool) -> None:
        """Count rows with so many accepted drafts each. left_out: the step behind them could not
        have rows of their sequences."""
        self._looks += rows * accepted
        self._count(rows * (accepted - left_out) / self._rows)

    def count_step(self, seconds: float, plain: float, *, continues: bool = False) -> None:
        """Count the time of a step with drafts, or behind one. plain: of one without; 0: it is not
        known, or the two cannot be compared. continues: it was planned behind drafts that were not
        verified yet, as no step that cannot be compared is."""
        loss = self._mean_loss
        if plain:
            loss = min(max(seconds / plain - 1, 0.0), MOST_LONGER)
        if plain and not continues:
            self._mean_loss += (loss - self._mean_loss) * LOSS_RATE
        self._count(-loss)

    def _count(self, steps: float) -> None:
        self._saved = min(max(self._saved + steps, -MAX_LOST), MAX_WON)
