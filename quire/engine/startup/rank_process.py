"""Rank processes of one model: starts them for the multi-process executor, and runs one rank.

Each rank reads its own share of the weights. The ranks find each other through a file without a
name that they inherit, so a start leaves no file and needs no port.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.memory.memory_plan import MemoryPlan, require_memory
from quire.config.options import Options
from quire.config.vllm_environment import start_process
from quire.distributed.collectives import Collectives, ProcessGroupCollectives, connect
from quire.distributed.mesh import Mesh, mesh_of
from quire.engine.startup.executor_setup import (
    build_inline_executor,
    build_runner,
    load_model,
    load_pooler,
    table_shape,
)
from quire.engine.startup.model_setup import describe_model, torch_device
from quire.engine.startup.plain_config import plain_config
from quire.engine.supervise.process_pipe import ignore_signals, spawn_process
from quire.errors import QuireError, RequestError
from quire.executors.multiproc import Executor as MultiProcess
from quire.executors.rank_group import (
    JOIN,
    LOAD,
    START_RANK,
    BuildRunner,
    MeasureMemory,
    RankGroup,
    StartRank,
)
from quire.executors.rank_loop import RankLink, RankLoop
from quire.executors.rank_monitor import STACK_SIGNAL
from quire.kernels.framework import late_work
from quire.kernels.native import library
from quire.platform import cpu
from quire.runner.model_input import ModelInputBuilder
from quire.runner.model_runner import ModelRunner
from quire.sandbox.parent_death import exit_with_parent
from quire.sandbox.pipe import WorkerPipe

log = logging.getLogger(__name__)


class Ranks:
    """The ranks of a model while its engine starts. The caller must close() it on an error."""

    def __init__(self, config: EngineConfig, options: Options) -> None:
        """Start the processes of ranks 1 and up; they begin to load.

        Raises: ConfigError (an option cannot be sent to another process, no shared memory).
        """
        plain, flat = plain_config(config, options)
        size = config.parallel.ranks
        threads = rank_threads(config)
        self._config = config
        self._devices = [torch_device(config.device.kind, rank) for rank in range(size)]
        env.set_collective_variables()
        library.limit_threads(threads)

        def spawn(end: socket.socket, fds: Sequence[int]) -> subprocess.Popen[bytes]:
            return spawn_process(__name__, end, env=env.rank_environment(threads), fds=fds)

        self._group = RankGroup(spawn, flat, plain, [str(one) for one in self._devices])
        log.info("%d ranks, %d threads each", size, threads)
        if config.device.kind == cpu.name:
            log.info("ranks on CPUs save memory; they are slower than one rank")

    def join(self) -> tuple[torch.device, Mesh, Collectives]:
        """Be rank 0. Returns its device, its place, and the collectives. Raises what a rank's
        start raised."""
        group = self._group
        group.status.begin(JOIN)
        group.status.finish(JOIN)
        group.wait_all(JOIN)
        group.status.begin(LOAD)
        mesh = mesh_of(self._config.parallel, 0)
        comm = connect(
            mesh,
            rendezvous_path(group.memory.rendezvous_fd),
            self._devices[0],
            counter=group.status.collective_words,
        )
        if isinstance(comm, ProcessGroupCollectives):
            group.monitor.on_failure(comm.abort_in_thread)
        late_work.set_preparation_callback(group.status.mark_preparing)
        return self._devices[0], mesh, comm

    def fit_blocks(self, plan: MemoryPlan, *, fixed: bool) -> MemoryPlan:
        """Wait for the weights of all ranks; return the plan with blocks that fit on each.

        fixed: the number of blocks was given. Raises NoRoom, and what a rank's start raised.
        """
        group = self._group
        group.status.finish(LOAD)
        group.wait_all(LOAD)
        number = group.send(MeasureMemory(), "measuring memory")
        group.status.begin(number)
        own = free_bytes(self._config, self._devices[0])
        group.status.finish(number)
        free = min(own, *(one.value for one in group.wait_all(number)))
        fitting = free // max(1, plan.block_bytes)
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
        inputs = ModelInputBuilder(table_shape(config))
        local = build_inline_executor(config, runner, inputs)
        group.status.finish(number)
        group.wait_all(number)
        return MultiProcess(inputs, local, group, config.parallel.step_limit_s)

    def close(self) -> None:
        """End the ranks."""
        self._group.close()


def rank_threads(config: EngineConfig) -> int:
    """Return the CPU threads of each rank."""
    return max(1, config.device.threads // config.parallel.ranks)


def rendezvous_path(fd: int) -> Path:
    """Return the path of an inherited file without a name, as this process may open it."""
    return Path(f"/proc/self/fd/{fd}")


def free_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes free for a rank; on a CPU engines and ranks share those of the machine."""
    if device.type == cpu.name:
        return cpu.memory().free // (config.parallel.ranks * config.parallel.engines)
    return torch.cuda.mem_get_info(device)[0]


def check_params(params: Any) -> None:
    """Raises: RequestError for sampling parameters that cannot be sent to a rank's process."""
    if params.logits_processors:
        message = "logits_processors that are functions need tensor_parallel_size=1"
        raise RequestError(message, param="logits_processors")


def main(fd: int) -> int:
    """Run one rank; the exit status."""
    ignore_signals()  # the engine handles them, and ends its ranks
    end = socket.socket(fileno=fd)
    orders = WorkerPipe(end, START_RANK).receive()
    if orders is None:
        return 1
    exit_with_parent()
    if os.getppid() != orders.engine_pid:
        return 1
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

    config = orders.config
    device = torch_device(config.device.kind, orders.rank)
    if device.type != cpu.name:
        torch.cuda.set_device(device)
    late_work.set_preparation_callback(link.status.mark_preparing)
    found = describe_model(Options.from_flat(orders.options), env.read())
    mesh = mesh_of(config.parallel, orders.rank)
    link.finish_phase(JOIN)
    comm = connect(
        mesh,
        rendezvous_path(orders.memory.rendezvous_fd),
        device,
        counter=link.status.collective_words,
    )
    model = load_model(found.model_type, found.config, found.folder, config, device, mesh, comm)
    processors = load_processors(config.model.logits_processors, config, device)
    pooler = load_pooler(model, found.folder, config, device)
    link.finish_phase(LOAD)

    def build(config: EngineConfig) -> ModelRunner:
        return build_runner(model, config, processors, None, pooler, device, comm)

    return RankLoop(link, build, lambda: free_bytes(config, device))
