"""Stage states: what a pipeline stage receives before its graphs, and the step that it hands on.

Graphs read fixed addresses and run at padded sizes, which are a matter of each stage; between
stages go the states of the step's tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.types import StepResult
from quire.distributed.stage_link import StageLink


class StageStates:
    """The states of a step: received, placed for a graph that runs, and handed on."""

    def __init__(self, link: StageLink, tokens: int) -> None:
        """tokens: of the longest graph."""
        self._link, self._tokens, self.is_last = link, tokens, link.is_last
        self._received: Tensor | None = None
        self._placed: Tensor | None = None  # [tokens, E], made with the first graph

    def receive(self, tokens: int) -> None:
        """Receive the states of the stage before, of a step of so many tokens."""
        self._received = self._link.receive(tokens)

    def forget(self) -> None:
        """Drop what a step that raised has received."""
        self._received = None

    def place(self, decodes: int = 0, places: int = 0) -> None:
        """Copy what was received to where graphs read it. Padding has states of earlier steps.

        decodes: the first so many are of rows that decode, for which the graph has `places`.
        """
        states, self._received = self._received, None
        if states is not None:
            placed = self.carried(places - decodes + len(states))
            assert placed is not None
            placed[:decodes].copy_(states[:decodes])
            placed[places:].copy_(states[decodes:])

    def carried(self, tokens: int) -> Tensor | None:
        """Return what the forward pass of so many tokens reads: of a graph, what was placed; else
        what was received. None: this is the first stage."""
        if self._received is not None or self._link.is_first:
            states, self._received = self._received, None
            return states
        if self._placed is None:
            self._placed = self._link.empty(self._tokens).zero_()
        return self._placed[:tokens]

    def hand_on(self, hidden: Tensor) -> HandedOnStep:
        """Send states [T, E] to the next stage; behind the last one there is none."""
        if not self.is_last:
            self._link.send(hidden)
        done = torch.cuda.Event()
        done.record()
        return HandedOnStep(done)


@dataclass(frozen=True, slots=True)
class HandedOnStep:
    """A step without results here: its states go to the next stage, or it has no rows."""

    done: torch.cuda.Event

    def wait(self) -> StepResult:
        self.done.synchronize()
        return StepResult(())
