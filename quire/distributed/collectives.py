"""Collectives of one mesh: sum and gather over the tensor-parallel ranks of a layer.

Layers call their `comm`, which is the same object in every layer of a rank. The ops themselves are
in quire.kernels.collectives.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.distributed.mesh import Mesh
from quire.distributed.peer_memory import connect_peers
from quire.errors import ConfigError
from quire.kernels import collectives as ops
from quire.kernels.formats.peer_memory import PeerMemory

TIMEOUT_S = 600.0
"""A collective fails after this long: a rank may compile kernels while the others wait."""


class Collectives(Protocol):
    """Exchange among the tensor-parallel ranks of one mesh."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x; x may be overwritten."""
        ...

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """Concatenate every rank's x along the last axis, in rank order, to a length of `total`.

        x is this rank's `uneven_shard_range(total, mesh)` of that axis.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with that of tp rank 0, and return it."""
        ...


class SingleProcessCollectives:
    """Collectives of a single process: they return x."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


class ProcessGroupCollectives:
    """Collectives of the tensor-parallel ranks, each in a process of its own."""

    def __init__(self, group: ops.Group, peers: PeerMemory | None = None) -> None:
        """peers: memory that the ranks' GPUs share; None: none."""
        self._group, self._peers = group, peers

    def all_reduce(self, x: Tensor) -> Tensor:
        return ops.all_reduce(x, self._group, self._peers)

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        return ops.all_gather(x, total, self._group)

    def broadcast(self, x: Tensor) -> Tensor:
        return ops.broadcast(x, self._group)


def connect(
    mesh: Mesh,
    rendezvous: Path | None = None,
    device: torch.device | str = "cpu",
    *,
    host: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
) -> Collectives:
    """Join the other ranks of the mesh, and return the collectives of the tensor-parallel ones.

    rendezvous: a file that does not exist yet, the same path for all ranks of one host, in a folder
    that only this user may write. The ranks find each other's addresses in it.
    host: the address that gloo's sockets listen on. They do not authenticate: keep it private.
    Blocks until all ranks have joined. No object is pickled.

    Raises: ConfigError if the mesh has several ranks and no rendezvous is given.
    """
    if mesh.size == 1:
        return SingleProcessCollectives()
    if rendezvous is None:
        raise ConfigError(
            f"tensor_parallel_size is {mesh.tp}; ranks of one model are processes that meet in a "
            "rendezvous file, and this process was started without one: use 1"
        )
    if mesh.tp == 1:
        return SingleProcessCollectives()
    import torch.distributed as dist

    device, timeout = torch.device(device), timedelta(seconds=timeout_s)
    first = mesh.rank - mesh.tp_rank
    store = dist.PrefixStore(f"tp{first}", dist.FileStore(str(rendezvous), mesh.size))
    store.set_timeout(timeout)
    group = _create_group(mesh, store, device, host, timeout)
    peers = connect_peers(mesh, store, device) if device.type == "cuda" else None
    return ProcessGroupCollectives(group, peers)


def _create_group(
    mesh: Mesh, store: Any, device: torch.device, host: str, timeout: timedelta
) -> ops.Group:
    """Create a backend for these ranks, without torch's process-wide default group."""
    import torch.distributed as dist

    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(store, mesh.tp_rank, mesh.tp, nccl)
        group.eager_connect_single_device(device)
        return group
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, mesh.tp_rank, mesh.tp, gloo)
