"""What decode steps and the host tell each other, in pinned memory that both can reach.

A copy command costs the stream a microsecond or two and the host more, twice a step. Here the
step's first kernel fetches its integers over the bus, and its last one delivers tokens there. A
graph has the addresses built in, so boxes are used in turn and the device counts the turns: `state`
holds the box of the next step and the box of the step under way. Outside graphs it is told.
"""

from __future__ import annotations

import torch

from quire.runner.inputs import Inputs, Ints
from quire.runner.upload import aligned, pinned

COLUMNS = 6
"""token ids, positions, contexts, rows, row slots, outputs: see quire.kernels.gpu.step."""


class Mailbox:
    """`depth` boxes each way, for steps of up to `rows` rows."""

    def __init__(self, rows: int, depth: int, device: torch.device) -> None:
        self.depth, self.stride = depth, aligned(rows)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)
        self.words = torch.zeros((COLUMNS, self.stride), dtype=torch.int32, device=device)
        self.inbox = pinned(depth * COLUMNS * self.stride)
        self.outbox = pinned(depth * 2 * self.stride)
        self._letters = self.inbox.numpy().reshape(depth, COLUMNS, self.stride)
        self._answers = self.outbox.numpy().reshape(depth, 2, self.stride)
        self._done: list[torch.cuda.Event | None] = [None] * depth
        self._turn = 0
        self.torn = False  # a step failed half way: the device's count may be off

    def post(self, inputs: Inputs, size: int) -> None:
        """Write the letter of the next step, which is run at `size` rows."""
        if self.torn:
            self.mend()
        done = self._done[self._turn]
        if done is not None:
            done.synchronize()
        letter, rows = self._letters[self._turn], len(inputs.slots)
        letter[0, :rows] = inputs.token_ids
        letter[1, :rows] = inputs.positions
        letter[2, :rows] = inputs.contexts
        letter[3, :rows] = inputs.slots
        letter[4, :rows] = inputs.slots
        letter[5, :rows] = inputs.outputs
        if rows < size:
            letter[:, rows:size] = 0
            letter[4, rows:size] = -1

    def mend(self) -> None:
        """Tell the device whose turn it is: it may have lost count."""
        self.state.fill_(self._turn)
        self.torn = False

    def posted(self, done: torch.cuda.Event) -> Ints:
        """The step is in line until `done`: where its answer [2, stride] will be."""
        answer = self._answers[self._turn]
        self._done[self._turn] = done
        self._turn = (self._turn + 1) % self.depth
        return answer
