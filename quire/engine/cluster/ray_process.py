"""Ray process: the only one that connects to Ray. Reserves bundles, runs the agents of nodes.

It ends, and gives all back, when the pipe to the engine's process is closed. Ray is imported here
and nowhere else; what it carries between nodes is plain values.
"""

from __future__ import annotations

import importlib
import logging
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import env
from quire.config.vllm_environment import start_process
from quire.engine.cluster.ray_messages import (
    START_LIMIT_S,
    TO_RAY,
    NodeEnded,
    PlacementFailed,
    PlaceRanks,
    RanksPlaced,
    StartNodes,
)
from quire.engine.cluster.ray_placement import (
    BundleHolder,
    NodeShare,
    RayNode,
    choose_bundles,
    describe_shortage,
    new_bundles,
    plan_nodes,
    share_ranks,
)
from quire.engine.supervise.process_pipe import ignore_signals
from quire.errors import ConfigError
from quire.platform import cpu
from quire.sandbox.pipe import WorkerPipe

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""How often the agents of nodes are looked at."""
WAIT_LOG_S = 10.0
"""How often a line is logged while ranks wait for their place."""


class NodeActor:
    """Holds one bundle. One actor of each node but the engine's runs the node's agent."""

    def describe(self, bundle: int) -> dict[str, Any]:
        """Return a BundleHolder, as plain values."""
        ray = importlib.import_module("ray")
        context = ray.get_runtime_context()
        return {
            "bundle": bundle,
            "node_id": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "devices": context.get_accelerator_ids().get("GPU", []),
        }

    def prepare(self, variables: dict[str, str], devices: list[str]) -> list[str]:
        """Set the environment of the node's ranks. Returns names that keep a value of the node."""
        return env.set_node_variables(variables, devices)

    def run(self, head: str, port: int, node: int, secret: bytes) -> int:
        """Run the node's agent until the head is gone."""
        from quire.engine.startup.node_process import run_node

        start_process()
        return run_node(head, port, node, secret)


def main(fd: int) -> int:
    """Serve one engine; the exit status."""
    ignore_signals()  # the engine handles them, and closes the pipe
    end = socket.socket(fileno=fd)
    pipe: WorkerPipe[Any] = WorkerPipe(end, TO_RAY)
    order = pipe.receive()
    if not isinstance(order, PlaceRanks):
        return 1
    Path("/proc/self/comm").write_text("quire-ray")
    start_process()
    env.disable_ray_usage_statistics()
    try:
        cluster = RayCluster(order)
    except ImportError:
        pipe.send(PlacementFailed("Ray is not installed: pip install 'quire-llm[ray]'"))
        return 1
    except ConnectionError as error:
        where = order.address or "this machine"
        pipe.send(
            PlacementFailed(
                f"no Ray cluster at {where} ({error}): start its nodes with `ray start` or "
                "deploy/ray/run_cluster.sh, or name it with --ray-address or RAY_ADDRESS; on one "
                "machine use distributed_executor_backend='mp'"
            )
        )
        return 1
    with cluster:
        try:
            pipe.send(RanksPlaced(cluster.place()))
        except ConfigError as error:
            pipe.send(PlacementFailed(str(error)))
            return 1
        while True:
            readable, _, _ = select.select([end], [], [], WATCH_INTERVAL_S)
            if readable:
                message = pipe.receive()
                if message is None:
                    return 0
                assert isinstance(message, StartNodes), message
                cluster.start_nodes(message)
            for reason in cluster.ended_nodes():
                pipe.send(NodeEnded(reason))


class RayCluster:
    """A connection to Ray, with the bundles and actors of one engine."""

    def __init__(self, order: PlaceRanks) -> None:
        """Connect. Raises ImportError (Ray), ConnectionError."""
        self._order = order
        self._ray: Any = importlib.import_module("ray")
        self._groups: Any = importlib.import_module("ray.util.placement_group")
        self._ray.init(address=order.address or "auto", logging_level=logging.WARNING)
        self._node_id: str = self._ray.get_runtime_context().get_node_id()
        self._resource = "GPU"
        if order.device == cpu.name or (
            order.device == "auto" and not any(one.total for one in self._alive_nodes())
        ):
            self._resource = "CPU"
        self._amount = order.gpus_per_rank if self._resource == "GPU" else 1.0
        self._own_group: Any = None
        self._actors: dict[int, Any] = {}  # by bundle
        self._nodes: tuple[NodeShare, ...] = ()
        self._running: dict[Any, NodeShare] = {}  # by the reference of its answer

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *raised: object) -> None:
        """Give bundles and actors back."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._own_group is not None:
            self._groups.remove_placement_group(self._own_group)
        self._ray.shutdown()

    def place(self) -> tuple[NodeShare, ...]:
        """Reserve a bundle for each rank. Raises ConfigError."""
        group, bundles = self._existing_group() if self._order.group else self._new_group()
        self._nodes = share_ranks(
            self._hold(group, bundles),
            self._node_id,
            ordered=self._order.indices is not None,
        )
        return self._nodes

    def _new_group(self) -> tuple[Any, Sequence[int]]:
        order, nodes = self._order, self._alive_nodes()
        if self._own_node().total < self._amount:
            raise self._shortage(0)
        planned = plan_nodes(nodes, order.ranks, self._amount, self._node_id) or [self._node_id]
        bundles, selectors = new_bundles(order.ranks, self._resource, self._amount, planned)
        self._own_group = self._groups.placement_group(
            bundles, strategy="PACK", bundle_label_selector=selectors
        )
        left = order.timeout_s
        while not self._own_group.wait(min(left, WAIT_LOG_S)):
            left -= WAIT_LOG_S
            if left <= 0:
                raise self._shortage(order.timeout_s)
            log.info("Ray has not placed %d ranks yet: %g s left", order.ranks, left)
        return self._own_group, range(order.ranks)

    def _existing_group(self) -> tuple[Any, Sequence[int]]:
        order, ray = self._order, self._ray
        try:
            key = ray.PlacementGroupID(bytes.fromhex(order.group or ""))
        except ValueError:
            raise ConfigError(
                f"ray_placement_group={order.group!r} is not the id of a placement group: "
                "placement_group.id.hex()"
            ) from None
        group = self._groups.PlacementGroup(key)
        table = self._groups.placement_group_table(group)
        if table.get("state") != "CREATED":
            raise ConfigError(
                f"the placement group {order.group} is not ready: {table.get('state', 'unknown')}"
            )
        bundles = [table["bundles"][i] for i in sorted(table["bundles"])]
        return group, choose_bundles(bundles, order.ranks, self._resource, order.indices)

    def _hold(self, group: Any, bundles: Sequence[int]) -> list[BundleHolder]:
        """Start an actor in each bundle."""
        ray = self._ray
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = ray.remote(NodeActor)
        on_gpu = self._resource == "GPU"
        for one in bundles:
            self._actors[one] = actor_class.options(
                num_gpus=self._amount if on_gpu else 0,
                num_cpus=0 if on_gpu else self._amount,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=one
                ),
            ).remote()
        try:
            found = ray.get(
                [actor.describe.remote(i) for i, actor in self._actors.items()],
                timeout=START_LIMIT_S,
            )
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"Ray has not started an actor in each bundle in {START_LIMIT_S:g} s: other "
                "actors may hold the bundles of the placement group"
            ) from None
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"an actor could not start; quire must be installed on all nodes: {error}"
            ) from error
        return [BundleHolder(**{**one, "devices": tuple(one["devices"])}) for one in found]

    def start_nodes(self, order: StartNodes) -> None:
        """Run the agent of each node but the engine's."""
        actors = [(share, self._actors[share.bundles[0]]) for share in self._nodes[1:]]
        kept = self._ray.get(
            [
                actor.prepare.remote(self._order.variables, list(share.devices))
                for share, actor in actors
            ]
        )
        for (share, _), names in zip(actors, kept, strict=True):
            if names:
                log.info("%s keeps its own values of %s", share.name, ", ".join(names))
        for node, (share, actor) in enumerate(actors, 1):
            answer = actor.run.remote(order.head, order.port, node, order.secret)
            self._running[answer] = share

    def ended_nodes(self) -> list[str]:
        """Return a message for each agent that has ended since the last call."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0)
        return [self._describe_end(self._running.pop(one), one) for one in ready]

    def _describe_end(self, share: NodeShare, answer: Any) -> str:
        try:
            status = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            return f"the agent of node {share.name} has died: {type(error).__name__}: {first}"
        return f"the agent of node {share.name} has ended with status {status}"

    def _shortage(self, seconds: float) -> ConfigError:
        order = self._order
        return ConfigError(
            describe_shortage(
                self._alive_nodes(), order.ranks, self._resource, self._node_id, seconds
            )
        )

    def _own_node(self) -> RayNode:
        return next(one for one in self._alive_nodes() if one.node_id == self._node_id)

    def _alive_nodes(self) -> list[RayNode]:
        state: Any = importlib.import_module("ray._private.state")
        free, resource = state.available_resources_per_node(), self._resource
        return [
            RayNode(
                one["NodeID"],
                one["NodeManagerAddress"],
                one["NodeManagerHostname"],
                one["Resources"].get(resource, 0.0),
                free.get(one["NodeID"], {}).get(resource, 0.0),
            )
            for one in self._ray.nodes()
            if one["Alive"]
        ]
