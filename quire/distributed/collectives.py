"""Collectives of one mesh: sums over the tensor-parallel ranks of a layer, sends between stages.

Layers call their `comm`, which is the same object in every layer of a rank. The ops themselves are
in quire.kernels.collectives.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.distributed.context_exchange import ContextExchange
from quire.distributed.counted_collectives import COUNTED_COLLECTIVES
from quire.distributed.dp_exchange import DataParallelExchange
from quire.distributed.mesh import Mesh
from quire.distributed.peer_memory import connect_peers
from quire.distributed.stage_tokens import GroupTokens, TokenTransport, kept_messages
from quire.errors import ConfigError, EngineError
from quire.kernels import collectives as ops
from quire.kernels.formats.peer_memory import PeerMemory
from quire.kernels.framework import lazy_fusion
from quire.kernels.native.op_tape import on_replay

if TYPE_CHECKING:
    from torch.distributed import Store

_SENT, _RECEIVED = (COUNTED_COLLECTIVES.index(name) for name in ("sent", "received"))
CONNECT_TIMEOUT_S = 120.0
"""Seconds for ranks to find each other's addresses."""
TIMEOUT_S = 600.0
"""A collective fails after this long: a rank may compile kernels while the others wait."""


class Collectives(Protocol):
    """Exchange among the tensor-parallel ranks of one mesh, and with the stages beside them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x; x may be overwritten."""
        ...

    def all_gather(self, x: Tensor, total: int, size: int | None = None) -> Tensor:
        """Concatenate every rank's x along the last axis, in rank order, to a length of `total`.

        x is this rank's `uneven_shard_range(total, mesh, size)` of that axis.
        """
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x with that of tp rank 0, and return it."""
        ...

    def send(self, x: Tensor, stage: int) -> None:
        """Send x to the rank of this tp rank in another pipeline stage, which must receive it."""
        ...

    def receive(self, x: Tensor, stage: int) -> Tensor:
        """Overwrite x with what the rank of this tp rank in another stage sends, and return it."""
        ...

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send one of the pieces, of bytes, to each rank; return the pieces sent to this rank.

        sizes: of the latter, in bytes. Not within a step.
        """
        ...


class SingleProcessCollectives:
    """Collectives of a single process: they return x."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, total: int, size: int | None = None) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def send(self, x: Tensor, stage: int) -> None:
        raise AssertionError("a single process has one stage")

    def receive(self, x: Tensor, stage: int) -> Tensor:
        raise AssertionError("a single process has one stage")

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return list(pieces)


class ProcessGroupCollectives:
    """Collectives of the ranks of a model, each in a process of its own."""

    dp_exchange: DataParallelExchange | None = None
    """Of the experts that data-parallel ranks share; None: there is one such rank."""
    context_exchange: ContextExchange | None = None
    """Of the tokens of sequences; None: each rank has those of its KV heads."""
    tokens: TokenTransport | None = None
    """Of sampled tokens to the first stage's device; None: they go through the host."""

    def __init__(
        self,
        group: ops.Group,
        peers: PeerMemory | None = None,
        counter: memoryview | None = None,
        stages: ops.Group = None,
    ) -> None:
        """group: the tensor-parallel ranks; None: this rank alone. peers: memory that their GPUs
        share; None: none. stages: the ranks of this tp rank in each stage; None: there is one.

        counter: two int64 words, in shared memory: how many collectives were begun, and the index
        of the last one's name. They show where a rank hangs. None: words of this process.
        """
        self._group, self._peers, self._stages = group, peers, stages
        self._ending: list[threading.Thread] = []
        self.sums_through = "NCCL" if peers is None else "the GPUs' memory"
        self._counter = memoryview(bytearray(16)).cast("q") if counter is None else counter

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._group is None:
            return x
        return on_replay(self._all_reduce, x)

    def _all_reduce(self, x: Tensor) -> Tensor:
        _count(self._counter, 1)
        return ops.all_reduce(x, self._group, self._peers)

    def all_gather(self, x: Tensor, total: int, size: int | None = None) -> Tensor:
        if self._group is None:
            return x
        return on_replay(partial(self._all_gather, total, size), x, shape=(*x.shape[:-1], total))

    def _all_gather(self, total: int, size: int | None, x: Tensor) -> Tensor:
        _count(self._counter, 2)
        return ops.all_gather(x, total, self._group, size)

    def broadcast(self, x: Tensor) -> Tensor:
        if self._group is None:
            return x
        _count(self._counter, 3)
        return ops.broadcast(x, self._group)

    def send(self, x: Tensor, stage: int) -> None:
        _count(self._counter, 4)
        ops.send(x, self._stages, stage)
        self._counter[1] = _SENT

    def receive(self, x: Tensor, stage: int) -> Tensor:
        _count(self._counter, 5)
        ops.receive(x, self._stages, stage)
        self._counter[1] = _RECEIVED
        return x

    def all_to_all(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        _count(self._counter, 6)
        return ops.all_to_all(pieces, sizes, self._group)

    def share_experts(self, replicas: ops.Group, ranks: ops.Group) -> None:
        """Set the exchange: see DataParallelExchange. It must not refer to this object."""
        count = partial(_count_named, self._counter)
        self.dp_exchange = DataParallelExchange(replicas, ranks, count)

    def share_tokens(self, group: ops.Group, mesh: Mesh) -> None:
        """Set the transport of tokens over a group of the first and the last stage."""
        count = partial(_count_named, self._counter)
        self.tokens = GroupTokens(group, kept_messages(mesh), count)

    def share_context(self, group: ops.Group, mesh: Mesh) -> None:
        """Set the exchange of the ranks of this group. It must not refer to this object."""
        count = partial(_count_named, self._counter)
        self.context_exchange = ContextExchange(group, mesh.dcp_rank, mesh.dcp, count)

    def abort_in_threads(self) -> list[threading.Thread]:
        """End collectives that wait for a rank that is gone; no other may follow.

        Kernels over shared memory read a word of the host. NCCL ends its own when it is called in
        another thread, and may not return itself. Each group has a thread: one may only return
        when the kernels of all have ended. Returns: those threads.
        """
        if not self._ending:
            if self._peers is not None:
                self._peers.abort.fill_(1)
            self._ending = _start_threads([one.abort for one in self._ends()])
        return self._ending

    def close_in_thread(self) -> list[threading.Thread]:
        """Give the connections back, one after the other in a thread, which it returns.

        Every rank must have ended, or wait in no collective, and the graphs with collectives must
        be gone: NCCL waits for them, and so may not return. A group that waits is never destroyed.
        """

        def close() -> None:
            for one in self._ends():
                one.abort()

        self._ending = self._ending or _start_threads([close])
        return self._ending

    def _ends(self) -> list[Any]:
        """What has an abort(), in the order in which it was made."""
        ends = [self._group, self._stages, self.tokens]
        if self.dp_exchange is not None:
            ends += self.dp_exchange.groups
        if self.context_exchange is not None:
            ends.append(self.context_exchange.group)
        return [one for one in ends if one is not None]


def _start_threads(targets: Sequence[Callable[[], object]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=one, name="quire-abort", daemon=True) for one in targets]
    for thread in threads:
        thread.start()
    return threads


def connect(
    mesh: Mesh,
    rendezvous: Path | Store | None = None,
    device: torch.device | str = "cpu",
    *,
    host: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
    counter: memoryview | None = None,
    peer_sums: bool = True,
) -> Collectives:
    """Join the other ranks of the mesh, and return this rank's collectives.

    rendezvous: an empty file, or one that does not exist yet, the same for all ranks of one host,
    which only this user may write; or a store. The ranks find each other's addresses in it.
    host: the address that gloo's sockets listen on. They do not authenticate: keep it private.
    counter: see ProcessGroupCollectives. peer_sums: GPUs may access each other's memory, for sums
    and for tokens of stages.
    Blocks until all ranks have joined. No object is pickled.

    Raises: ConfigError if the mesh has several ranks and no rendezvous is given.
    """
    if mesh.size == 1:
        return SingleProcessCollectives()
    if rendezvous is None:
        raise ConfigError(
            f"tensor_parallel_size is {mesh.tp} and pipeline_parallel_size {mesh.pp}; ranks of one "
            "model are processes that meet in a rendezvous file, and this process was started "
            "without one: use 1"
        )
    import torch.distributed as dist

    device, timeout = torch.device(device), timedelta(seconds=timeout_s)
    in_file = isinstance(rendezvous, Path)
    if isinstance(rendezvous, Path):
        rendezvous = dist.FileStore(str(rendezvous), mesh.size)

    def join(name: str, rank: int, size: int) -> tuple[ops.Group, Store]:
        store = dist.PrefixStore(name, rendezvous)
        store.set_timeout(timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S)))
        return _create_group(store, rank, size, device, host, timeout), store

    group = stages = peers = None
    if mesh.tp > 1:
        group, store = join(f"tp{mesh.rank - mesh.tp_rank}", mesh.tp_rank, mesh.tp)
        peers = connect_peers(mesh, store, device) if device.type == "cuda" and peer_sums else None
    if mesh.pp > 1:
        first = mesh.rank - mesh.pp_rank * mesh.tp
        stages, _ = join(f"pp{first}", mesh.pp_rank, mesh.pp)
    comm = ProcessGroupCollectives(group, peers, counter, stages)
    if mesh.pp > 1 and mesh.pp_rank in (0, mesh.pp - 1):
        if device.type == "cuda" and peer_sums:
            kind = importlib.import_module("quire.distributed.peer_tokens")  # with its kernels
            comm.tokens = kind.connect(mesh, dist.PrefixStore("tokens", rendezvous), device)
        elif device.type != "cuda":
            comm.share_tokens(join(f"tokens{first}", int(mesh.pp_rank > 0), 2)[0], mesh)
    if mesh.dp > 1:
        replicas, _ = join(f"dp{mesh.rank % (mesh.tp * mesh.pp)}", mesh.dp_rank, mesh.dp)
        ranks, _ = join(f"ep{mesh.pp_rank}", mesh.ep_rank, mesh.ep)
        comm.share_experts(replicas, ranks)
    if mesh.dcp > 1:
        shares, _ = join(f"dcp{mesh.rank - mesh.dcp_rank}", mesh.dcp_rank, mesh.dcp)
        comm.share_context(shares, mesh)
    if in_file:  # threads of NCCL's groups that report an error would wait for the file to return
        rendezvous.set_timeout(timedelta(milliseconds=1))
    return comm


def _count(counter: memoryview, kind: int) -> None:
    """Count a collective that this rank begins. kind: its index in COUNTED_COLLECTIVES."""
    counter[1] = kind
    counter[0] += 1


def _count_named(counter: memoryview, name: str) -> None:
    _count(counter, COUNTED_COLLECTIVES.index(name))


def open_store(address: str, port: int, listener: int | None = None) -> Store:
    """Return the store in which the ranks of several hosts meet. It does not authenticate.

    listener: descriptor of a socket that listens there, which this process takes over: it holds
    the store. None: another process does.
    """
    import torch.distributed as dist

    more: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    return dist.TCPStore(
        address,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        wait_for_workers=False,
        **more,
    )


def check_sum(mesh: Mesh, comm: Collectives, device: torch.device) -> None:
    """Add up 1 MiB of known numbers over the tensor-parallel ranks, and hand the sum on from stage
    to stage; exchange some among ranks that share contexts. Raises EngineError."""
    if isinstance(comm, ProcessGroupCollectives) and comm.context_exchange is not None:
        _check_exchange(mesh, comm.context_exchange, device)
    if isinstance(comm, ProcessGroupCollectives) and comm.dp_exchange is not None:
        _check_rows(mesh, comm.dp_exchange, device)
    own = torch.full((1 << 18,), float(1 + mesh.tp_rank), device=device)
    want = mesh.tp * (mesh.tp + 1) / 2
    found = comm.all_reduce(own)
    if mesh.pp_rank:
        found = comm.receive(torch.zeros_like(found), mesh.pp_rank - 1)
    if mesh.pp_rank < mesh.pp - 1:
        comm.send(found, mesh.pp_rank + 1)
    lazy_fusion.flush()
    if not bool((found == want).all()):
        raise EngineError(
            f"a sum of known numbers over {mesh.tp} ranks is wrong at rank {mesh.rank}: "
            f"{found.min().item()} to {found.max().item()}, not {want}"
        )


def _check_exchange(mesh: Mesh, exchange: ContextExchange, device: torch.device) -> None:
    """Send each rank of the exchange its place. NCCL connects ranks when they first exchange, which
    must not be while a graph is captured."""
    places = torch.arange(mesh.dcp, dtype=torch.float32, device=device)
    found = exchange.scatter_parts(places).flatten().tolist()
    if found != [mesh.dcp_rank] * mesh.dcp:
        raise EngineError(f"an exchange of known numbers is wrong at rank {mesh.rank}: {found}")


def _check_rows(mesh: Mesh, exchange: DataParallelExchange, device: torch.device) -> None:
    """Gather a row of each data-parallel rank, and sum up what all ranks add to it."""
    own = torch.full((1, 4), float(mesh.dp_rank), device=device)
    exchange.begin_step([1] * mesh.dp)
    x, _, _ = exchange.gather(own, own.int(), own)
    found = [*x[:, 0].tolist(), *exchange.combine(x)[0].tolist()]
    exchange.begin_step(())
    if found != [*range(mesh.dp), *[mesh.ep * mesh.dp_rank] * 4]:
        raise EngineError(f"an exchange of known rows is wrong at rank {mesh.rank}: {found}")


def join_gloo_group(mesh: Mesh, store: Store) -> ops.Group:
    """Join the tensor-parallel ranks in a group for tensors of the CPU. Blocks until all joined."""
    cpu = torch.device("cpu")
    limit = timedelta(seconds=TIMEOUT_S)
    return _create_group(store, mesh.tp_rank, mesh.tp, cpu, "127.0.0.1", limit)


def _create_group(
    store: Any, rank: int, size: int, device: torch.device, host: str, timeout: timedelta
) -> ops.Group:
    """Create a backend for these ranks, without torch's process-wide default group."""
    import torch.distributed as dist

    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, nccl)
        group.eager_connect_single_device(device)
        return group
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)
