"""Placement of ranks on a Ray cluster: bundles, the ranks of each node, and the table of an error.

Pure: plain values of Ray come in (quire.engine.cluster.ray_process has the calls). A bundle is the
share of one rank in a placement group: one GPU, or one CPU for a rank on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from quire.errors import ConfigError

NODE_LABEL = "ray.io/node-id"
"""The label of Ray that names a node."""


class RayNode(msgspec.Struct, frozen=True):
    """A node of the cluster that is alive."""

    node_id: str
    address: str
    host: str
    total: float  # of GPUs, or of CPUs for ranks on CPUs
    free: float

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


class BundleHolder(msgspec.Struct, frozen=True):
    """An actor that holds a bundle: where it is, and what it may use."""

    bundle: int
    node_id: str
    address: str
    host: str
    devices: tuple[str, ...]  # GPUs, by index or UUID; empty for a CPU


class NodeShare(msgspec.Struct, frozen=True):
    """The ranks of one node: consecutive ones, the engine's node first."""

    address: str
    host: str
    bundles: tuple[int, ...]  # one for each rank
    devices: tuple[str, ...]  # the GPU of each rank; empty on CPUs

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


def plan_nodes(
    nodes: Sequence[RayNode], ranks: int, amount: float, engine_node: str
) -> list[str] | None:
    """Return the id of a node for each rank: the same number on each of as few nodes as possible.

    The engine's node is the first, since rank 0 is in the engine's process; of the others those
    with the least room. None: there is no such plan now.
    """
    room = {one.node_id: int(one.free / amount + 1e-6) for one in nodes}
    others = sorted(
        (one for one in nodes if one.node_id != engine_node),
        key=lambda one: (room[one.node_id], one.address, one.node_id),
    )
    for count in (n for n in range(1, ranks + 1) if ranks % n == 0):
        each = ranks // count
        fitting = [one.node_id for one in others if room[one.node_id] >= each]
        if room.get(engine_node, 0) >= each and len(fitting) >= count - 1:
            return [node for node in (engine_node, *fitting[: count - 1]) for _ in range(each)]
    return None


def new_bundles(
    ranks: int, resource: str, amount: float, nodes: Sequence[str]
) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
    """Return the bundles of a new group, and the label selector of each. nodes: of the first."""
    selectors: list[dict[str, str]] = [{} for _ in range(ranks)]
    for selector, node in zip(selectors, nodes):
        selector[NODE_LABEL] = node
    return [{resource: amount} for _ in range(ranks)], selectors


def choose_bundles(
    bundles: Sequence[Mapping[str, float]], ranks: int, resource: str, indices: str | None
) -> list[int]:
    """Return the bundles of an existing group that the ranks use, in order.

    indices: those that were requested, with commas. Raises ConfigError.
    """
    usable = [i for i, one in enumerate(bundles) if one.get(resource, 0)]
    if indices is not None:
        try:
            chosen = [int(one) for one in indices.split(",")]
        except ValueError:
            raise ConfigError(
                f"ray_bundle_indices={indices!r} must be numbers with commas, as 0,1"
            ) from None
        if len(chosen) != ranks or len(set(chosen)) != ranks:
            raise ConfigError(
                f"ray_bundle_indices={indices!r} must be {ranks} different numbers, one for each "
                "rank"
            )
        if wrong := [i for i in chosen if i not in usable]:
            raise ConfigError(
                f"ray_bundle_indices={indices!r}: the placement group has no bundle {wrong[0]} "
                f"with a {resource}; it has {usable}"
            )
    else:
        chosen = usable[:ranks]
    if len(chosen) < ranks:
        raise ConfigError(
            f"the model has {ranks} ranks, and the placement group has {len(usable)} bundles with "
            f"a {resource}: {ranks - len(usable)} are missing; give it {ranks} bundles of "
            f"{{{resource!r}: 1}}, or none: the engine makes a group of its own"
        )
    if large := [i for i in chosen if bundles[i][resource] > 1]:
        raise ConfigError(
            f"bundle {large[0]} of the placement group has {bundles[large[0]][resource]:g} "
            f"{resource}s: a rank needs one bundle with one, {{{resource!r}: 1}}"
        )
    return chosen


def share_ranks(
    holders: Sequence[BundleHolder], engine_node: str, *, ordered: bool
) -> tuple[NodeShare, ...]:
    """Return the ranks of each node: the engine's node first, then others by address.

    ordered: the bundles were requested in this order, which each node keeps. Raises ConfigError if
    the engine's node has none, or the nodes do not have the same number.
    """
    by_node: dict[str, list[BundleHolder]] = {}
    for one in holders:
        by_node.setdefault(one.node_id, []).append(one)
    if engine_node not in by_node:
        found = ", ".join(sorted({f"{one.host} ({one.address})" for one in holders}))
        raise ConfigError(
            "rank 0 runs in the engine's process, and the placement group has no bundle on the "
            f"engine's node; its bundles are on {found}: start the engine there, or give this node "
            "a bundle"
        )
    nodes = sorted(
        by_node.items(), key=lambda item: (item[0] != engine_node, item[1][0].address, item[0])
    )
    shares = tuple(_share(found, ordered=ordered) for _, found in nodes)
    if len({len(one.bundles) for one in shares}) > 1:
        found = ", ".join(f"{len(one.bundles)} on {one.name}" for one in shares)
        raise ConfigError(
            f"the bundles of the placement group are spread unevenly, {found}: each node must have "
            "the same number; free GPUs on one of them, or use a group with equal numbers"
        )
    return shares


def _share(holders: list[BundleHolder], *, ordered: bool) -> NodeShare:
    if not ordered:
        holders = sorted(holders, key=lambda one: (_device_order(one.devices), one.bundle))
    return NodeShare(
        holders[0].address,
        holders[0].host,
        tuple(one.bundle for one in holders),
        tuple(device for one in holders for device in one.devices),
    )


def _device_order(devices: Sequence[str]) -> list[tuple[int, str]]:
    return [(int(one) if one.isdigit() else 0, one) for one in devices]


def describe_shortage(
    nodes: Sequence[RayNode], ranks: int, resource: str, engine_node: str, seconds: float
) -> str:
    """Return the message of a placement that was not made in time, with a table of the nodes."""
    free, total = (sum(getattr(one, name) for one in nodes) for name in ("free", "total"))
    own = next((one for one in nodes if one.node_id == engine_node), None)
    if total < ranks:
        why = f"the cluster has {total:g} {resource}s"
        todo = f"add nodes, or use at most {total:g} ranks"
    elif own is not None and own.total < 1:
        why = f"this node has no {resource}, and rank 0 runs in the engine's process"
        todo = f"start the engine on a node with a {resource}"
    elif own is not None and own.free < 1:
        why = f"all {own.total:g} {resource}s of this node are in use, and rank 0 needs one"
        todo = "end what holds them (`ray status`, `ray list placement-groups`)"
    elif free < ranks:
        why = f"{free:g} of the cluster's {total:g} {resource}s are free"
        todo = "end what holds the others (`ray status`, `ray list placement-groups`)"
    else:
        why = f"{free:g} {resource}s are free now"
        todo = "try again, or raise --ray-placement-timeout-seconds"
    lines = [
        f"Ray has not placed {ranks} ranks, with one {resource} each, in {seconds:g} s: {why}; "
        f"{todo}"
    ]
    width = max((len(one.name) for one in nodes), default=0)
    for one in sorted(nodes, key=lambda one: (one.node_id != engine_node, one.address)):
        here = ", this node" if one.node_id == engine_node else ""
        lines.append(f"  {one.name:<{width}}  {one.free:g} of {one.total:g} free{here}")
    return "\n".join(lines)
