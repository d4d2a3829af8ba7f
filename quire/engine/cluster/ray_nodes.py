"""Ray nodes: the nodes on which Ray has placed the ranks of a model, through a process of its own.

Ray is used to place ranks and to start the agent of each other node (run_node), never in a step.
It runs in a process beside the engine's: its threads, signal handlers and crashes stay there, and
the engine's process starts none of it. That process gives all back when the engine ends.
"""

from __future__ import annotations

import logging
import secrets
import socket
import subprocess
from dataclasses import replace

from quire import env
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.distributed.cluster_secret import ClusterSecret
from quire.distributed.node_address import listen
from quire.engine.cluster.ray_context import with_ray_context
from quire.engine.cluster.ray_messages import (
    FROM_RAY,
    START_LIMIT_S,
    FromRay,
    NodeEnded,
    PlacementFailed,
    PlaceRanks,
    RanksPlaced,
    StartNodes,
    ToRay,
)
from quire.engine.cluster.ray_placement import NodeShare
from quire.engine.startup.head_setup import gather_nodes
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import ConfigError
from quire.executors.node_head import NodeHead
from quire.sandbox.pipe import WorkerPipe

log = logging.getLogger(__name__)

PROCESS = "quire.engine.cluster.ray_process"


class RayNodes:
    """The nodes of a model's ranks. The caller must close() it."""

    nodes: tuple[NodeShare, ...]
    """That of the engine first."""
    options: Options
    """With the number of nodes, over which ranks are spread as over others."""

    def __init__(self, options: Options, order: PlaceRanks) -> None:
        """Place the ranks. Blocks until each has a bundle. Raises ConfigError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn_process(PROCESS, theirs)
        self._pipe: WorkerPipe[ToRay | FromRay] = WorkerPipe(ours, FROM_RAY)  # type: ignore[arg-type]
        try:
            self._pipe.send(order)
            self.nodes = self._placed(order.timeout_s + START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if self.nodes[0].devices:
            env.set_visible_gpus(self.nodes[0].devices)
        self.options = replace(
            options,
            parallel=replace(
                options.parallel,
                nnodes=len(self.nodes),
                distributed_executor_backend="mp" if order.ranks > 1 else "uni",
            ),
        )
        log.info("Ray has placed %d ranks: %s", order.ranks, describe_nodes(self.nodes))

    def _placed(self, timeout_s: float) -> tuple[NodeShare, ...]:
        try:
            answer = self._pipe.receive(timeout_s)
        except TimeoutError:
            raise ConfigError(
                f"Ray has not answered in {timeout_s:g} s: see `ray status`"
            ) from None
        if isinstance(answer, PlacementFailed):
            raise ConfigError(answer.message)
        if not isinstance(answer, RanksPlaced):
            raise ConfigError(
                f"the Ray process has ended with status {self._process.wait(10)}: its log has more"
            )
        return answer.nodes

    def gather(self, config: EngineConfig) -> NodeHead | None:
        """Start the agents of the other nodes, and wait for them; None: there are none.

        Their connections get a secret of their own. Raises ConfigError.
        """
        if len(self.nodes) == 1:
            return None
        secret = ClusterSecret(secrets.token_bytes(32))
        address = env.host_address() or self.nodes[0].address
        listener = listen(address, 0, what="as Ray knows this node; QUIRE_HOST_IP sets another")

        def start(head: NodeHead) -> None:
            where = head.endpoint
            self._pipe.send(StartNodes(where.address, where.port, secret.secret))

        return gather_nodes(config, secret, listener, {}, start, self._check)

    def _check(self) -> None:
        """Raise ConfigError if the agent of a node, or the Ray process, has ended."""
        try:
            message = self._pipe.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        raise ConfigError(
            message.message
            if isinstance(message, NodeEnded)
            else "the process that holds the Ray placement group has ended"
        )

    def close(self) -> None:
        """Give bundles and actors back. Harmless when called again."""
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def describe_nodes(nodes: tuple[NodeShare, ...]) -> str:
    """Return one line: the ranks of each node."""
    parts, first = [], 0
    for one in nodes:
        last = first + len(one.bundles) - 1
        ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
        gpus = f", GPU {', '.join(one.devices)}" if one.devices else ""
        parts.append(f"{ranks} on {one.name}{gpus}")
        first = last + 1
    return "; ".join(parts)


def place_ranks(options: Options) -> RayNodes:
    """Place the ranks of a model, as the options request. Raises ConfigError."""
    options = with_ray_context(options)
    section, ray = options.parallel, options.ray
    for name in ("nnodes", "data_parallel_size"):
        if getattr(section, name) > 1:
            raise ConfigError(
                f"{name}={getattr(section, name)} and distributed_executor_backend='ray': Ray "
                f"places the ranks of one engine on nodes that it finds; leave {name} out"
            )
    order = PlaceRanks(
        section.tensor_parallel_size * section.pipeline_parallel_size,
        options.device.device,  # not cuda.available(): that opens the driver, for all GPUs
        ray.ray_gpus_per_rank,
        ray.ray_placement_timeout_seconds,
        ray.ray_address,
        ray.ray_placement_group,
        ray.ray_bundle_indices,
        env.copied_variables(ray.ray_env_vars_to_copy or ()),
    )
    return RayNodes(options, order)
