"""Probes of all nodes: gathers their reports and connections, through Ray or a common address."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quire import env
from quire.engine.cluster.node_exchange import NodeExchange
from quire.engine.cluster.node_report import NodeProbe, NodeReport
from quire.errors import ConfigError

REPORT_LIMIT_S = 60.0
"""Time in which each node must report."""

_REPORT = msgspec.msgpack.Decoder(NodeReport)
_ERRORS = msgspec.msgpack.Decoder(dict[str, str])


class ProbedNodes(NamedTuple):
    """What all nodes report, the head's first."""

    reports: list[NodeReport]
    unreachable: dict[str, dict[str, str]]
    """Address of a node -> address -> error of those to which it could not connect."""
    silent: dict[str, str] = {}  # noqa: RUF012 - of a tuple: it cannot be assigned
    """Node -> error of those without a report."""


def probe_this_node(model: str | None) -> ProbedNodes:
    """Report on this machine alone."""
    probe = NodeProbe()
    try:
        return ProbedNodes([probe.report(model)], {})
    finally:
        probe.close()


def probe_through(exchange: NodeExchange, model: str | None) -> ProbedNodes:
    """Exchange reports with all nodes, each of which calls this. Raises ConfigError."""
    probe = NodeProbe()
    try:
        own = msgspec.msgpack.encode(probe.report(model, exchange.head))
        reports = [_REPORT.decode(one) for one in exchange.gather(own, REPORT_LIMIT_S)]
        failed = probe.connect(_others(reports, _REPORT.decode(own)))
        answers = exchange.gather(msgspec.msgpack.encode(failed), REPORT_LIMIT_S)
    finally:
        probe.close()
    errors = map(_ERRORS.decode, answers)
    return ProbedNodes(reports, {one.address: found for one, found in zip(reports, errors)})


def _others(reports: Sequence[NodeReport], own: NodeReport) -> dict[str, int]:
    """Return address -> port of the nodes that listen, but this one."""
    return {one.address: one.port for one in reports if one.port and one.address != own.address}


class ProbeActor:
    """A NodeProbe in an actor of Ray; its values are msgpack."""

    def __init__(self) -> None:
        self._probe = NodeProbe()

    def report(self, model: str | None, ray_address: str) -> bytes:
        return msgspec.msgpack.encode(self._probe.report(model, ray_address=ray_address))

    def connect(self, others: dict[str, int]) -> dict[str, str]:
        return self._probe.connect(others)


def probe_ray_nodes(address: str | None, model: str | None) -> ProbedNodes:
    """Report on each node of a Ray cluster. Raises ConfigError."""
    env.disable_ray_usage_statistics()
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("Ray is not installed: pip install 'quire-llm[ray]'") from None
    try:
        ray.init(address=address or "auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster at {address or 'this machine'} ({error}): start its nodes with `ray "
            "start`, or check without Ray: --nnodes, --node-rank and --master-addr on each node"
        ) from None
    try:
        return _probe_ray_nodes(ray, model)
    finally:
        ray.shutdown()


def _probe_ray_nodes(ray: Any, model: str | None) -> ProbedNodes:
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted(
        (one for one in ray.nodes() if one["Alive"]), key=lambda one: one["NodeID"] != own
    )
    actors = [
        ray.remote(ProbeActor)
        .options(
            num_cpus=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(
                one["NodeID"], soft=False
            ),
        )
        .remote()
        for one in nodes
    ]
    asked = [
        actor.report.remote(model, node["NodeManagerAddress"])
        for actor, node in zip(actors, nodes, strict=True)
    ]
    reports: list[NodeReport] = []
    reporting, silent = [], {}
    for actor, node, answer in zip(actors, nodes, asked, strict=True):
        try:
            reports.append(_REPORT.decode(ray.get(answer, timeout=REPORT_LIMIT_S)))
            reporting.append(actor)
        except ray.exceptions.RayError as error:
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            silent[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    connecting = [
        actor.connect.remote(_others(reports, one))
        for actor, one in zip(reporting, reports, strict=True)
    ]
    errors = ray.get(connecting)
    return ProbedNodes(reports, {one.address: found for one, found in zip(reports, errors)}, silent)
