"""Stage link: one rank's connection to the pipeline stages before and after its own.

Each step hands hidden states [T, E] from stage to stage, in the order of the steps. A rank sends
its part of the columns to the same tp rank of the next stage, where the ranks gather them: slow
links between stages carry each number once. A step that raises on this stage still hands states
on, so no other stage waits for them, and later steps meet their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.distributed.collectives import Collectives
from quire.distributed.mesh import Mesh, uneven_shard_range


class StageLink:
    """The default has one stage: nothing is sent."""

    def __init__(
        self,
        mesh: Mesh = Mesh(),  # noqa: B008 - an immutable value
        comm: Collectives | None = None,
        width: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """width: E. dtype, device: of the hidden states."""
        self.mesh = mesh
        self.is_first, self.is_last = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp - 1
        self.stage, self._comm, self._width = mesh.pp_rank, comm, width
        self._columns = uneven_shard_range(width, mesh)
        self._dtype, self._device = dtype, device
        self._tokens = 0  # T of the step
        self._to_receive = self._to_send = False

    @property
    def is_alone(self) -> bool:
        """Whether there is one stage."""
        return self.is_first and self.is_last

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Within, the states of a step of so many tokens are handed on, once; at its end at the
        latest."""
        self._tokens = tokens
        self._to_receive, self._to_send = not self.is_first, not self.is_last
        try:
            yield
        finally:
            if tokens:
                self._hand_on_nothing()

    def receive(self, tokens: int) -> Tensor | None:
        """Return the hidden states of the stage before, of so many tokens: [T, E]; None: this is
        the first stage."""
        if self.is_first:
            return None
        part = self._receive_columns(tokens)
        assert self._comm is not None
        return self._comm.all_gather(part, self._width)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [T, E] to the next stage."""
        assert self._comm is not None, "the last stage has no next one"
        self._to_send = False
        self._comm.send(hidden[:, self._columns.start : self._columns.stop], self.stage + 1)

    def empty(self, tokens: int) -> Tensor:
        """Allocate hidden states [T, E]."""
        return torch.empty((tokens, self._width), dtype=self._dtype, device=self._device)

    def _receive_columns(self, tokens: int) -> Tensor:
        self._to_receive = False
        assert self._comm is not None
        return self._comm.receive(self._empty_columns(tokens), self.stage - 1)

    def _hand_on_nothing(self) -> None:
        """After a step that raised: take what is sent to this stage, and send zeros."""
        if self._to_receive:
            self._receive_columns(self._tokens)
        if self._to_send:
            self._to_send = False
            assert self._comm is not None
            self._comm.send(self._empty_columns(self._tokens).zero_(), self.stage + 1)

    def _empty_columns(self, tokens: int) -> Tensor:
        return torch.empty((tokens, len(self._columns)), dtype=self._dtype, device=self._device)
