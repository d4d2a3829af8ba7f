"""What processes of one model say to each other. With one process there is nothing to say.

Layers call their `comm`; they do not ask how many processes there are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.distributed.mesh import Mesh
from quire.errors import ConfigError


class Collectives(Protocol):
    """Talk among the tp ranks of one mesh."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x; x may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x side by side along the last axis, in rank order."""
        ...


class SingleProcessCollectives:
    """One process: its share is the whole."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


def init_collectives(mesh: Mesh) -> Collectives:
    """The collectives of this mesh."""
    if mesh.tp > 1:
        raise ConfigError(
            f"tensor_parallel_size is {mesh.tp}; this build runs a model in one process, so use 1"
        )
    return SingleProcessCollectives()
