"""Node check: finds what is wrong among the reports of the machines of a cluster. Pure.

The first report is the head's; others are compared with it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from quire.config.memory.memory_plan import gib
from quire.engine.cluster.node_report import NodeReport

SHARED_MEMORY_BYTES = 1 << 30
"""NCCL keeps buffers in /dev/shm: so much should be free on a node with several GPUs."""
USED_SHARE = 0.1
"""A GPU of which others use more is named."""


class Finding(NamedTuple):
    """Something that is wrong with a node, or may be."""

    level: Literal["error", "warning"]
    node: str
    message: str


def check_nodes(
    reports: Sequence[NodeReport],
    unreachable: Mapping[str, Mapping[str, str]],
    *,
    model: str | None = None,
) -> list[Finding]:
    """Return what is wrong, errors first.

    unreachable: address of a node -> address -> error of those to which it could not connect.
    model: the folder whose files the reports list.
    """
    found = [
        *_addresses(reports, single=len(reports) == 1),
        *_reachability(reports, unreachable),
        *_versions(reports),
        *(_model(reports, model) if model is not None else ()),
        *_gpus(reports),
        *_shared_memory(reports),
        *_networks(reports),
    ]
    return sorted(found, key=lambda one: one.level != "error")


def _addresses(reports: Sequence[NodeReport], *, single: bool) -> Iterator[Finding]:
    counts = Counter(one.address for one in reports)
    for one in reports:
        own = {address for addresses in one.interfaces.values() for address in addresses}
        if one.address not in own:
            yield Finding(
                "error",
                one.name,
                f"no interface has the address {one.address}; it has {_interfaces(one)}. Set "
                "QUIRE_HOST_IP on this node to the one that others reach",
            )
        elif not single and ipaddress.ip_address(one.address).is_loopback:
            yield Finding(
                "error",
                one.name,
                "it is known by a loopback address, which no other node can reach; it has "
                f"{_interfaces(one)}. Set QUIRE_HOST_IP on this node",
            )
        elif one.ray_address not in (None, one.address):
            yield Finding(
                "error",
                one.name,
                f"Ray knows it as {one.ray_address}, and its address is {one.address}: start Ray "
                f"with --node-ip-address={one.address}, or set QUIRE_HOST_IP to {one.ray_address}",
            )
        elif counts[one.address] > 1:
            yield Finding(
                "warning", one.name, f"{counts[one.address]} nodes have the address {one.address}"
            )


def _reachability(
    reports: Sequence[NodeReport], unreachable: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    names = {one.address: one for one in reports}
    for address, failed in unreachable.items():
        for other, error in failed.items():
            target = names[other]
            yield Finding(
                "error",
                names[address].name,
                f"it cannot connect to {target.name}, interface {interface_of(target)}, port "
                f"{target.port}: {error}. A firewall, or another network: open all ports between "
                "the nodes, or set QUIRE_HOST_IP there to an address of the common network",
            )


def _versions(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    head = reports[0]
    for one in reports[1:]:
        for name in sorted({*head.versions, *one.versions}):
            here, there = one.versions.get(name), head.versions.get(name)
            if here != there:
                yield Finding(
                    "error",
                    one.name,
                    f"{name} is {here or 'not installed'}, and {there or 'not installed'} on "
                    f"{head.name}: use one image on all nodes",
                )


def _model(reports: Sequence[NodeReport], model: str) -> Iterator[Finding]:
    head = next((one for one in reports if one.model), None)
    for one in reports:
        if one.model is None:
            yield Finding(
                "error",
                one.name,
                f"there is no model in {model}: each node needs it at the same path",
            )
        elif head is not None and one.model != head.model:
            assert head.model is not None
            names = sorted({*one.model, *head.model})
            name = next(n for n in names if one.model.get(n) != head.model.get(n))
            yield Finding(
                "error",
                one.name,
                f"{model}/{name} is {one.model.get(name, 'missing')}, and "
                f"{head.model.get(name, 'missing')} on {head.name}: copy the model again",
            )


def _gpus(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    with_gpus = [one for one in reports if one.gpus]
    for one in reports:
        if not one.gpus:
            level: Literal["error", "warning"] = "error" if with_gpus else "warning"
            yield Finding(level, one.name, f"no GPU: {one.gpu_name}")
            continue
        head = with_gpus[0]
        if (one.gpus, one.gpu_name) != (head.gpus, head.gpu_name):
            yield Finding(
                "warning",
                one.name,
                f"{one.gpus} x {one.gpu_name}, and {head.gpus} x {head.gpu_name} on {head.name}: "
                "the slowest and smallest rank bounds all",
            )
        used = one.gpu_bytes - one.gpu_free_bytes
        if used > USED_SHARE * one.gpu_bytes:
            yield Finding(
                "warning",
                one.name,
                f"{gib(used)} of the first GPU's {gib(one.gpu_bytes)} are in use: `nvidia-smi`",
            )


def _shared_memory(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    for one in reports:
        if one.gpus > 1 and one.shared_memory_bytes < SHARED_MEMORY_BYTES:
            yield Finding(
                "error",
                one.name,
                f"/dev/shm has {gib(one.shared_memory_bytes)} free, and NCCL needs "
                f"{gib(SHARED_MEMORY_BYTES)}: start the container with --shm-size 10.24g or "
                "--ipc=host",
            )


def _networks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    for one in reports:
        for name, value in one.variables.items():
            if not _matching_interfaces(name, value, one):
                yield Finding(
                    "error",
                    one.name,
                    f"{name}={value} matches no interface; it has {_interfaces(one)}",
                )
            elif interface_of(one) not in _matching_interfaces(name, value, one):
                yield Finding(
                    "warning",
                    one.name,
                    f"{name}={value}, and its address {one.address} is on {interface_of(one)}",
                )
    if len(reports) > 1 and any(one.gpus for one in reports):
        for one in reports:
            if not one.rdma:
                yield Finding(
                    "warning",
                    one.name,
                    "no RDMA device: sums over nodes use TCP. Use tensor parallelism inside a node "
                    "and pipeline parallelism between nodes",
                )


def _matching_interfaces(variable: str, value: str, node: NodeReport) -> list[str]:
    """Return the interfaces that a variable of NCCL or gloo names.

    NCCL: beginnings of names, with commas; `=` before: whole names; `^`: all others. gloo: a name.
    """
    if variable == "GLOO_SOCKET_IFNAME":
        return [name for name in node.interfaces if name in value.split(",")]
    exclude, rest = value.startswith("^"), value.removeprefix("^")
    exact, words = rest.startswith("="), rest.removeprefix("=").split(",")
    matches: Callable[[str], bool] = lambda name: any(  # noqa: E731
        name == word if exact else fnmatchcase(name, f"{word}*") for word in words
    )
    return [name for name in node.interfaces if matches(name) != exclude]


def interface_of(node: NodeReport) -> str:
    """Return the name of the interface with the node's address."""
    return next((name for name, found in node.interfaces.items() if node.address in found), "none")


def _interfaces(node: NodeReport) -> str:
    return ", ".join(
        f"{name} {' '.join(addresses)}" for name, addresses in node.interfaces.items() if addresses
    )


def describe_node(node: NodeReport) -> str:
    """Return the lines about one node."""
    versions = ", ".join(f"{name} {number}" for name, number in node.versions.items())
    gpus = (
        f"{node.gpus} x {node.gpu_name}, {gib(node.gpu_bytes)}, {gib(node.gpu_free_bytes)} free"
        if node.gpus
        else f"no GPU: {node.gpu_name}"
    )
    rows = {
        "network": f"{interface_of(node)} {node.address}",
        "versions": versions,
        "devices": gpus,
        "memory": f"{gib(node.host_free_bytes)} free",
        "/dev/shm": f"{gib(node.shared_memory_bytes)} free",
        "RDMA": ", ".join(node.rdma) or "none",
    }
    return "\n".join([node.name, *(f"  {name:<9} {value}" for name, value in rows.items())])
