"""Stage tokens: the way of sampled tokens from the last pipeline stage to the first one's device.

    step n        last stage: sampling -> last tokens of all slots [M] -> first stage
    step n + 1    first stage: waits for those of step n, if it reads one of them -> embedding

So a step may be submitted before the host has the tokens that it reads. Each step that samples
sends one message, also if it raises, so both stages count the same messages. A message has the
newest token of every slot, and contains all earlier ones. It may be newer than what a step reads:
a slot's token is replaced by a step that the first stage computes after that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from quire.distributed.mesh import Mesh
from quire.kernels.collectives import Group


class TokenTransport(Protocol):
    """One end of the way. Messages are numbered from 1 on, in the order in which they are sent."""

    def send(self, last_tokens: Tensor) -> None:
        """Send a copy of last_tokens [M] int32, without waiting for anything."""
        ...

    def expect(self, last_tokens: Tensor) -> int:
        """Count a message like last_tokens [M] that the last stage will send: its number."""
        ...

    def receive(self, number: int, last_tokens: Tensor) -> None:
        """Overwrite last_tokens [M] with a message: the one of this number, or a later one."""
        ...

    def abort(self) -> None:
        """End waits for a rank that is gone. Any thread; nothing may follow."""
        ...


class StageTokens:
    """The tokens of one runner. The default has no transport, and does nothing."""

    def __init__(
        self,
        mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
        transport: TokenTransport | None = None,
        last_tokens: Tensor | None = None,
    ) -> None:
        """last_tokens: [M] int32, the last token of each slot on this rank's device."""
        self._transport, self._last_tokens = transport, last_tokens
        self.receives = transport is not None and mesh.pp_rank == 0
        # of the last messages: more than there are steps in flight, whose tokens the host lacks
        self._expected: deque[tuple[int, frozenset[int]]] = deque(maxlen=kept_messages(mesh))

    @contextmanager
    def step(self, unknown: Sequence[int], sampled: Sequence[int]) -> Iterator[None]:
        """The context of a step, on the stream that runs it. unknown: slots whose last token it
        reads. sampled: slots of the rows that it samples."""
        if self._transport is None:
            yield
            return
        assert self._last_tokens is not None
        if self.receives and unknown:
            self._receive(self._transport, self._last_tokens, unknown)
        try:
            yield
        finally:
            if sampled and self.receives:
                number = self._transport.expect(self._last_tokens)
                self._expected.append((number, frozenset(sampled)))
            elif sampled:
                self._transport.send(self._last_tokens)

    def _receive(
        self, transport: TokenTransport, last_tokens: Tensor, unknown: Sequence[int]
    ) -> None:
        """Wait for the newest message that has a token of these slots: it has those of all."""
        for number, slots in reversed(self._expected):
            if not slots.isdisjoint(unknown):
                transport.receive(number, last_tokens)
                return


def kept_messages(mesh: Mesh) -> int:
    """Return a number of messages of which the oldest has arrived, whatever is in flight."""
    return 2 * mesh.pp + 4


class GroupTokens:
    """Transport over a group of two ranks on CPUs: the first stage's is rank 0."""

    def __init__(self, group: Group, kept: int, count: Callable[[str], None]) -> None:
        """kept: messages that may be under way. count: of collectives, by name."""
        self._group, self._kept, self._count, self._number = group, kept, count, 0
        self._under_way: deque[tuple[int, torch.distributed.Work, Tensor]] = deque()

    def send(self, last_tokens: Tensor) -> None:
        copy = last_tokens.clone()
        self._add(self._group.send([copy], 0, 0), copy)

    def expect(self, last_tokens: Tensor) -> int:
        place = torch.empty_like(last_tokens)
        self._add(self._group.recv([place], 1, 0), place)
        return self._number

    def receive(self, number: int, last_tokens: Tensor) -> None:
        self._count("receive")
        while self._under_way and self._under_way[0][0] <= number:
            _, work, place = self._under_way.popleft()
            work.wait()
            last_tokens.copy_(place)
        self._count("received")

    def abort(self) -> None:
        self._group.abort()

    def _add(self, work: torch.distributed.Work, tensor: Tensor) -> None:
        """The buffers of messages that have surely arrived are given back."""
        self._number += 1
        self._under_way.append((self._number, work, tensor))
        if len(self._under_way) > self._kept:
            self._under_way.popleft()[1].wait()
