"""quire doctor [MODEL]: checks this machine, or with --cluster all machines of a cluster: versions,
addresses, ports, GPUs, shared memory, and whether each has the model's folder.

quire doctor --cluster finds the nodes of the Ray cluster. Without Ray, run it on each node:
quire doctor --cluster --nnodes N --node-rank K --master-addr ADDRESS. The exit status is 1 if there
is an error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire import env
from quire.distributed.cluster_secret import read_cluster_secret
from quire.engine.cluster.node_check import Finding, check_nodes, describe_node
from quire.engine.cluster.node_exchange import NodeExchange
from quire.engine.cluster.probe_nodes import (
    ProbedNodes,
    probe_ray_nodes,
    probe_this_node,
    probe_through,
)
from quire.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    found = probe(args)
    findings = [
        Finding("error", node, f"it does not report: {error}")
        for node, error in found.silent.items()
    ]
    findings += check_nodes(found.reports, found.unreachable, model=args.model)
    if args.json:
        nodes = [msgspec.to_builtins(one) for one in found.reports]
        print(json.dumps({"nodes": nodes, "findings": [f._asdict() for f in findings]}, indent=2))
    else:
        for one in found.reports:
            print(describe_node(one))
        for finding in findings:
            print(f"{finding.level}: {finding.node}: {finding.message}")
        if not findings:
            print("nothing is wrong")
    return int(any(one.level == "error" for one in findings))


def parser() -> argparse.ArgumentParser:
    """Return the parser of `quire doctor`."""
    parser = argparse.ArgumentParser(
        prog="quire doctor",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="folder of a model that each node must have")
    parser.add_argument("--cluster", action="store_true", help="check all nodes")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="address of the Ray cluster")
    parser.add_argument("-n", "--nnodes", type=int, help="number of nodes, without Ray")
    parser.add_argument(
        "-r", "--node-rank", type=int, default=0, help="of this node: 0 is the head"
    )
    parser.add_argument("--master-addr", default="127.0.0.1", help="address of node 0")
    parser.add_argument("--master-port", type=int, default=29501, help="port of node 0")
    parser.add_argument("--cluster-secret-file", help="file with the secret that all nodes share")
    return parser


def probe(args: argparse.Namespace) -> ProbedNodes:
    """Report on the nodes that the arguments mean. Raises ConfigError."""
    if args.model is not None and not Path(args.model).is_absolute():
        raise ConfigError(
            f"MODEL is {args.model!r}: give the absolute path of a folder; models with a name of a "
            "hub are downloaded by each node"
        )
    if not args.cluster:
        if args.nnodes is not None or args.ray_address is not None:
            raise ConfigError("nnodes and ray_address need --cluster")
        return probe_this_node(args.model)
    if args.nnodes is None:
        return probe_ray_nodes(args.ray_address, args.model)
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"node_rank={args.node_rank} must be less than nnodes={args.nnodes}")
    secret = read_cluster_secret(args.cluster_secret_file, env.read())
    exchange = NodeExchange(args.master_addr, args.master_port, args.node_rank, args.nnodes, secret)
    try:
        return probe_through(exchange, args.model)
    finally:
        exchange.close()
