"""Rank processes of one model: starts them for the multi-process executor, and runs one rank.

Each rank reads its own share of the weights. The ranks find each other through a file without a
name that they inherit, so a start leaves no file and needs no port.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import resource
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.memory.memory_plan import MemoryPlan, require_memory
from quire.config.options import Options
from quire.config.stages import stage_cache
from quire.config.vllm_environment import start_process
from quire.distributed.collectives import (
    Collectives,
    ProcessGroupCollectives,
    check_sum,
    connect,
    open_store,
)
from quire.distributed.mesh import Mesh, mesh_of
from quire.engine.startup.drafter_setup import load_drafter
from quire.engine.startup.early_ranks import take_early_rank
from quire.engine.startup.executor_setup import (
    build_inline_executor,
    build_runner,
    link_stages,
    load_model,
    load_pooler,
    table_shape,
)
from quire.engine.startup.gpu_memory import DeviceUse, free_device_memory, measure_device
from quire.engine.startup.gpu_preparation import GpuPreparation
from quire.engine.startup.model_setup import describe_model, torch_device
from quire.engine.startup.plain_config import plain_config
from quire.engine.startup.startup_timer import StartupTimer
from quire.engine.supervise.process_pipe import ignore_signals, spawn_process
from quire.errors import ConfigError, QuireError, RequestError
from quire.executors.inline import Executor as Inline
from quire.executors.local_ranks import (
    CONNECT,
    JOIN,
    LOAD,
    START_RANK,
    Meeting,
    RankMemory,
    StartRank,
)
from quire.executors.multiproc import Executor as MultiProcess
from quire.executors.multiproc import RankLease
from quire.executors.rank_group import BuildRunner, MeasureMemory, NodeRanks, RankGroup
from quire.executors.rank_loop import RankLink, RankLoop
from quire.executors.rank_monitor import STACK_SIGNAL
from quire.executors.rank_status import RankStatusWriter
from quire.kernels.framework import late_work
from quire.kernels.native import library
from quire.platform import cpu, cuda
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.sandbox.parent_death import exit_with_parent
from quire.sandbox.pipe import WorkerPipe
from quire.weights.folder_digest import folder_digest

log = logging.getLogger(__name__)


RankDescription = tuple[str, dict[str, str]]
"""The kernels of a rank, and the digests of its model's files."""


class Ranks:
    """The ranks of a model while its engine starts. The caller must close() it on an error."""

    def __init__(
        self, config: EngineConfig, options: Options, nodes: NodeRanks | None = None
    ) -> None:
        """Start the processes of ranks 1 and up; they begin to load. nodes: of the last ones.

        Raises: ConfigError (an option cannot be sent to another process, no shared memory).
        """
        plain, flat = plain_config(config, options)
        size = config.parallel.ranks
        here = size if nodes is None else nodes.ranks.start
        threads = rank_threads(config, here)
        self._config = config
        self._device = torch_device(config.device.kind)
        env.set_collective_variables(watched=True)
        library.limit_threads(threads)

        def spawn(end: socket.socket, fds: Sequence[int]) -> subprocess.Popen[bytes]:
            variables = env.rank_environment(threads)
            early = take_early_rank(end, fds, variables)
            return early or spawn_process(__name__, end, env=variables, fds=fds)

        self._nodes = nodes
        names = [str(torch_device(config.device.kind, rank)) for rank in range(here)]
        if nodes is not None:
            names += nodes.device_names()
        self._group = RankGroup(spawn, flat, plain, names, nodes)
        self._lease = RankLease(self._group)
        self._executor: Callable[[], Inline | None] = lambda: None  # of rank 0
        log.info("%d ranks, %d threads each", size, threads)
        if config.device.kind == cpu.name:
            log.info("ranks on CPUs save memory; they are slower than one rank")

    def join(self, folder: Path, timer: StartupTimer) -> tuple[torch.device, Mesh, Collectives]:
        """Be rank 0. Returns its device, its place, and the collectives. folder: of the model.
        timer: of the start.

        Raises what a rank's start raised, and ConfigError if a node has another model.
        """
        group = self._group
        group.status.begin(JOIN)
        group.status.finish(JOIN)
        joined = group.wait_all(JOIN)
        timer.lap("ranks' imports")
        if self._nodes is not None:
            own = describe_rank(folder, self._device)
            for rank in self._nodes.ranks:
                compare_ranks(group.monitor.name_rank(rank), own, joined[rank - 1].value)
        group.status.begin(CONNECT)
        meeting = None if self._nodes is None else self._nodes.meeting
        try:
            mesh, comm = connect_rank(
                self._config, 0, self._device, group.memory, meeting, group.status
            )
        except Exception:
            group.check()  # a rank that has failed is the reason
            raise
        group.status.finish(CONNECT)
        group.wait_all(CONNECT)
        timer.lap("meeting")
        group.status.begin(LOAD)
        if isinstance(comm, ProcessGroupCollectives):
            group.set_collectives(comm)
            if self._device.type == cuda.name:
                log.info(
                    "%d x %s, link %s; sums over ranks run through %s",
                    mesh.size,
                    cuda.device_properties().name,
                    "unknown" if self._nodes is not None else cuda.find_link(0, 1),
                    comm.sums_through,
                )
        late_work.set_preparation_callback(group.status.mark_preparing)
        return self._device, mesh, comm

    def wait_for_weights(self, timer: StartupTimer) -> None:
        """Wait until every rank has its weights. Raises what a rank's start raised.

        timer: gets the stages of the ranks' starts.
        """
        self._group.status.finish(LOAD)
        for rank, one in enumerate(self._group.wait_all(LOAD), 1):
            for name, seconds in (one.value or {}).items():
                timer.add_concurrent(f"rank {rank} {name}", seconds)

    def measure_devices(self, own: DeviceUse) -> list[DeviceUse]:
        """Return the use of each GPU. own: of rank 0. The others drop their runners first."""
        group = self._group
        number = group.send(MeasureMemory(), "measuring memory")
        group.status.begin(number)
        group.status.finish(number)
        return [own, *(DeviceUse(*one.value) for one in group.wait_all(number))]

    def fit_blocks(self, plan: MemoryPlan, *, fixed: bool) -> MemoryPlan:
        """Return the plan with blocks that fit in the memory that is free for each rank on a CPU.

        fixed: the number of blocks was given. Raises NoRoom.
        """
        group = self._group
        number = group.send(MeasureMemory(), "measuring memory")
        group.status.begin(number)
        own = fitting_blocks(self._config, 0)
        group.status.finish(number)
        fitting = min(own, *(one.value for one in group.wait_all(number)))
        if fixed or fitting >= plan.num_blocks:
            return plan
        log.warning(
            "the KV cache has %d blocks, not %d: no more fit in the memory of the tightest rank",
            fitting,
            plan.num_blocks,
        )
        plan = replace(plan, num_blocks=fitting)
        require_memory(plan)
        return plan

    def build_executor(self, config: EngineConfig, runner: ModelRunner) -> MultiProcess:
        """Build the runners of the other ranks, and the executor. runner: of rank 0."""
        group = self._group
        plain, _ = plain_config(config, Options())
        number = group.send(BuildRunner(plain), "building the runner")
        group.status.begin(number)
        section = config.parallel
        inputs = [ModelInputBuilder(table_shape(config)) for _ in range(section.data)]
        local = build_inline_executor(config, runner, inputs[0])
        self._executor = weakref.ref(local)
        group.status.finish(number)
        group.wait_all(number)
        return MultiProcess(inputs, local, group, section, self._lease)

    def begin_serving(self) -> None:
        """The executor that was built last runs steps from now on."""
        local = self._executor()
        assert local is not None, "an executor is built first"
        self._group.set_finish(partial(local.call, "release_kv_memory"))

    def close(self, reason: str) -> None:
        """End the ranks: the start failed."""
        self._group.monitor.fail(reason)
        self._group.close()


def describe_rank(folder: Path, device: torch.device) -> RankDescription:
    """Describe what ranks on several nodes must have the same of. folder: of the model."""
    kernels = ""
    if device.type == cpu.name:
        found = library.load_library()
        kernels = "no native kernels" if found is None else f"native kernels for {found.features}"
    return kernels, folder_digest(folder)


def compare_ranks(name: str, own: RankDescription, other: RankDescription) -> None:
    """Raise ConfigError if a rank of this name has others than rank 0."""
    (kernels, files), (other_kernels, other_files) = own, other
    if kernels != other_kernels:
        raise ConfigError(
            f"{name} has {other_kernels}, and the head {kernels}: all ranks must compute the same "
            "numbers, in steps of the same shapes. Install a C++ compiler on each node, or set "
            "QUIRE_CPU_ISA on all to one that each of their CPUs has (none: no native kernels)"
        )
    for file in sorted({*files, *other_files}):
        if files.get(file) != other_files.get(file):
            here, there = ("has" if file in one else "lacks" for one in (files, other_files))
            raise ConfigError(
                f"{name} has another model than the head: it {there} {file}, the head {here} it, "
                "and they are not the same file"
            )


def rank_threads(config: EngineConfig, here: int) -> int:
    """Return the CPU threads of each of the ranks of this host."""
    return max(1, config.device.threads // here)


def connect_rank(
    config: EngineConfig,
    rank: int,
    device: torch.device,
    memory: RankMemory,
    meeting: Meeting | None,
    status: RankStatusWriter,
) -> tuple[Mesh, Collectives]:
    """Connect a rank to the others, and add up some numbers. Raises EngineError for a wrong sum."""
    mesh, words = mesh_of(config.parallel, rank), status.collective_words
    own_sums = config.parallel.custom_all_reduce
    if meeting is None:
        with rendezvous_path(memory.rendezvous_fd) as path:
            comm = connect(mesh, path, device, counter=words, peer_sums=own_sums)
    else:
        store = open_store(meeting.address, meeting.port)
        address = meeting.own_address
        comm = connect(mesh, store, device, host=address, counter=words, peer_sums=own_sums)
    check_sum(mesh, comm, device)
    return mesh, comm


@contextmanager
def rendezvous_path(fd: int) -> Iterator[Path]:
    """Yield the path of an inherited file without a name, as this process may open it.

    Torch's store opens the path again when it ends, which may be long after the file is closed, and
    writes into what it finds. So the path has a descriptor whose number no other file gets by then:
    they get the lowest.
    """
    high = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 15) * 7 // 8
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    try:
        yield Path(f"/proc/self/fd/{own}")
    finally:
        os.close(own)


def free_bytes(config: EngineConfig) -> int:
    """Return the bytes free for a rank on a CPU: engines and ranks share those of the machine."""
    return cpu.memory().free // (config.parallel.ranks_per_node * config.parallel.engines)


def fitting_blocks(config: EngineConfig, stage: int) -> int:
    """Return the number of blocks that fit in the free memory of a rank on a CPU."""
    cache = stage_cache(config.cache, config.parallel, stage)
    return free_bytes(config) // max(1, cache.block_bytes)


def check_params(params: Any) -> None:
    """Raises: RequestError for sampling parameters that cannot be sent to a rank's process."""
    if params.logits_processors:
        message = "logits_processors that are functions need tensor_parallel_size=1"
        raise RequestError(message, param="logits_processors")


def main(fd: int, numbers: Mapping[int, int] = MappingProxyType({})) -> int:
    """Run one rank; the exit status. numbers: of descriptors in the engine's process -> of those in
    this one, where they differ."""
    ignore_signals()  # the engine handles them, and ends its ranks
    end = socket.socket(fileno=fd)
    orders = WorkerPipe(end, START_RANK).receive()
    if orders is None:
        return 1
    exit_with_parent()
    if os.getppid() != orders.parent_pid:
        return 1
    orders = msgspec.structs.replace(orders, memory=orders.memory.renumbered(numbers))
    if numbers:  # torch was imported with another number
        torch.set_num_threads(rank_threads(orders.config, orders.local_ranks))
    faulthandler.register(STACK_SIGNAL)
    Path("/proc/self/comm").write_text(f"quire-rank-{orders.rank}")
    link = RankLink(end, orders.memory, orders.rank)
    try:
        start_process(level=orders.config.observe.log_level)
        loop = _load(link, orders)
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("rank %d cannot start", orders.rank)
        link.fail_start(error)
    loop.serve()


def _load(link: RankLink, orders: StartRank) -> RankLoop:
    from quire.sampling.processors import load_processors

    config, environment = orders.config, env.read()
    device = torch_device(config.device.kind, orders.local_rank)
    late_work.set_preparation_callback(link.status.mark_preparing)
    with StartupTimer() as timer:
        found = describe_model(Options.from_flat(orders.options), environment)
        timer.lap("model files")
        gpu = None
        if device.type == cuda.name:
            gpu = GpuPreparation(found, config, orders.options, environment, device, timer)
            gpu.wait()
            timer.lap("context")
        joined = None if orders.meeting is None else describe_rank(found.folder, device)
        link.finish_phase(JOIN, joined)
        mesh, comm = connect_rank(
            config, orders.rank, device, orders.memory, orders.meeting, link.status
        )
        link.finish_phase(CONNECT)
        timer.lap("meeting")
        model = load_model(found.model_type, found.config, found.folder, config, device, mesh, comm)
        drafter = load_drafter(found.drafter, model, config, device, mesh, comm)
        processors = load_processors(config.model.logits_processors, config, device)
        stages = link_stages(found.config, config, device, mesh, comm)
        pooler = load_pooler(model, found.folder, config, device, stages)
        timer.lap("weights")
        if gpu is not None:
            gpu.kernels.load()
            timer.lap("kernels")
    link.finish_phase(LOAD, {"before": timer.seconds_before, **timer.laps})

    def build(config: EngineConfig) -> ModelRunner:
        if gpu is not None:
            free_device_memory(device)
        return build_runner(model, config, processors, None, pooler, device, drafter, comm, stages)

    def measure() -> DeviceUse | int:
        if gpu is None:
            return fitting_blocks(config, mesh.pp_rank)
        free_device_memory(device)
        return measure_device(device)

    return RankLoop(
        link,
        build,
        measure,
        dp_rank=mesh.dp_rank,
        gives_result=orders.rank in [ranks.start for ranks in config.parallel.sampling_ranks],
        set_up_thread=None if gpu is None else lambda: torch.cuda.set_device(device),
    )
