"""Rank processes of one model: starts them for the multi-process executor, and runs one rank.

Each rank reads its own share of the weights, and finds the others through a file in a folder that
only this user may read.
"""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.config.vllm_environment import start_process
from quire.engine.startup.executor_setup import (
    build_runner,
    load_model,
    load_pooler,
    table_shape,
)
from quire.engine.startup.plain_config import plain_config
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import QuireError, RequestError
from quire.executors.multiproc import TO_RANK, RankError, RankProcess, StartRank
from quire.executors.multiproc import Executor as MultiProcess
from quire.executors.rank_loop import RankLoop
from quire.runner.model_input import ModelInputBuilder
from quire.sandbox.pipe import WorkerPipe

log = logging.getLogger(__name__)


def start_ranks(config: EngineConfig, options: Options) -> MultiProcess:
    """Start an executor with one process per rank, ready for steps.

    Raises: ConfigError (an option cannot be sent to another process, or the ranks cannot start).
    """
    plain, flat = plain_config(config, options)
    size = config.parallel.tensor
    folder = tempfile.mkdtemp(prefix="quire-ranks-")  # 0700: the file in it is not authenticated
    threads = max(1, config.device.threads // size)
    orders = [StartRank(flat, plain, rank, f"{folder}/rendezvous") for rank in range(size)]
    ranks = [_spawn_rank(threads) for _ in orders]
    log.info("%d ranks, %d threads each", size, threads)
    try:
        return MultiProcess(ModelInputBuilder(table_shape(config)), ranks, orders)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_params(params: Any) -> None:
    """Raises: RequestError for sampling parameters that cannot be sent to a rank's process."""
    if params.logits_processors:
        message = "logits_processors that are functions need tensor_parallel_size=1"
        raise RequestError(message, param="logits_processors")


def _spawn_rank(threads: int) -> RankProcess:
    parent_end, child_end = socket.socketpair()
    with child_end:
        environment = env.child_environment(OMP_NUM_THREADS=str(threads))
        return spawn_process(__name__, child_end, env=environment), parent_end


def main(fd: int) -> int:
    """Run one rank; the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine handles them, and ends its ranks
        signal.signal(number, signal.SIG_IGN)
    pipe = WorkerPipe(socket.socket(fileno=fd), TO_RANK)
    orders = pipe.receive()
    if not isinstance(orders, StartRank):
        return 1
    Path("/proc/self/comm").write_text(f"quire-rank-{orders.rank}")
    try:
        start_process(level=orders.config.observe.log_level)
        loop = _build_loop(pipe, orders)
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("rank %d cannot start", orders.rank)
        pipe.send(RankError(0, type(error).__name__, str(error)))  # type: ignore[arg-type]
        return 1
    loop.serve()


def _build_loop(pipe: WorkerPipe[Any], orders: StartRank) -> RankLoop:
    from quire.distributed.collectives import connect
    from quire.distributed.mesh import Mesh
    from quire.engine.startup.model_setup import describe_model, torch_device
    from quire.sampling.processors import load_processors

    config = orders.config
    device = torch_device(config.device.kind)
    found = describe_model(Options.from_flat(orders.options), env.read())
    mesh = Mesh(tp=config.parallel.tensor, rank=orders.rank)
    comm = connect(mesh, Path(orders.rendezvous), device)
    model = load_model(found.model_type, found.config, found.folder, config, device, mesh, comm)
    processors = load_processors(config.model.logits_processors, config, device)
    pooler = load_pooler(model, found.folder, config, device)
    runner = build_runner(model, config, processors, pooler=pooler)
    return RankLoop(pipe, runner, orders.rank)
