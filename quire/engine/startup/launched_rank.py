"""Launched rank: joins the ranks that torchrun started as programs of their own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial

import torch

from quire import env
from quire.config.engine_config import EngineConfig, ParallelSection
from quire.distributed.collectives import (
    ProcessGroupCollectives,
    connect,
    join_gloo_group,
)
from quire.distributed.mesh import Mesh, mesh_of
from quire.engine.startup.executor_setup import build_inline_executor, table_shape
from quire.engine.startup.gpu_memory import DeviceUse
from quire.engine.startup.model_setup import torch_device
from quire.errors import ConfigError
from quire.executors.external_launcher import CollectivesLease
from quire.executors.external_launcher import Executor as ExternalLauncher
from quire.executors.inline import Executor as Inline
from quire.kernels.collectives import Group
from quire.kernels.native import library
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner

_engine_numbers = itertools.count()


class LaunchedRank:
    """The rank of this process, joined to the others."""

    def __init__(
        self, device: torch.device, mesh: Mesh, comm: ProcessGroupCollectives, checks: Group
    ) -> None:
        self.device, self.mesh, self.comm, self.checks = device, mesh, comm, checks
        self._lease = CollectivesLease(comm)
        self._executor: Callable[[], Inline | None] = lambda: None

    def build_executor(self, config: EngineConfig, runner: ModelRunner) -> ExternalLauncher:
        """Build the executor. runner: of this rank."""
        inputs = ModelInputBuilder(table_shape(config))
        local = build_inline_executor(config, runner, inputs)
        self._executor = weakref.ref(local)
        return ExternalLauncher(inputs, local, self.checks, self._lease)

    def begin_serving(self) -> None:
        """The executor that was built last runs steps from now on."""
        local = self._executor()
        assert local is not None, "an executor is built first"
        self._lease.set_finish(partial(local.call, "release_kv_memory"))

    def measure_devices(self, own: DeviceUse) -> list[DeviceUse]:
        """Return the use of each rank's GPU. own: of this rank."""
        numbers = torch.tensor(own)
        found = torch.empty(self.checks.size() * len(own), dtype=numbers.dtype)
        self.checks._allgather_base(found, numbers).wait()
        return [DeviceUse(*one) for one in found.view(self.checks.size(), -1).tolist()]


def local_rank(section: ParallelSection) -> int:
    """Return the index of this process's device: LOCAL_RANK where torchrun starts the ranks."""
    found = env.launcher_rank() if section.backend == "external_launcher" else None
    return 0 if found is None else found[1]


def join_launched_ranks(config: EngineConfig) -> LaunchedRank:
    """Join the other ranks. Blocks until all have joined. Raises ConfigError."""
    found = env.launcher_rank()
    size = config.parallel.ranks
    if found is None:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' needs RANK, LOCAL_RANK and "
            f"WORLD_SIZE in the environment: start with torchrun --nproc-per-node {size} PROGRAM"
        )
    rank, local_rank, world = found
    if world != size:
        raise ConfigError(
            f"WORLD_SIZE is {world} and tensor_parallel_size={size}: they must be equal"
        )
    env.set_collective_variables(watched=False)
    library.limit_threads(max(1, config.device.threads // size))
    import torch.distributed as dist

    device = torch_device(config.device.kind, local_rank)
    mesh = mesh_of(config.parallel, rank)
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"quire-{next(_engine_numbers)}", store)
    comm = connect(mesh, store, device, peer_sums=config.parallel.custom_all_reduce)
    assert isinstance(comm, ProcessGroupCollectives), comm
    checks = join_gloo_group(mesh, dist.PrefixStore("checks", store))
    return LaunchedRank(device, mesh, comm, checks)
