"""Messages between an engine's process and its Ray process."""

from __future__ import annotations

import msgspec

from quire.engine.cluster.ray_placement import NodeShare

START_LIMIT_S = 120.0
"""Time to connect to the cluster and to start an actor for each bundle."""


class PlaceRanks(msgspec.Struct, tag=True, frozen=True):
    """To the Ray process: connect, and reserve a bundle for each rank."""

    ranks: int
    device: str  # of the option; auto: GPUs if the cluster has some
    gpus_per_rank: float
    timeout_s: float
    address: str | None  # of the cluster; None: as Ray finds it
    group: str | None  # id of an existing placement group, in hexadecimal
    indices: str | None  # of its bundles
    variables: dict[str, str]  # of the environment: defaults on the other nodes


class StartNodes(msgspec.Struct, tag=True, frozen=True):
    """To the Ray process: run the agent of each other node."""

    head: str
    port: int
    secret: bytes


class RanksPlaced(msgspec.Struct, tag=True, frozen=True):
    """From the Ray process: where the ranks are."""

    nodes: tuple[NodeShare, ...]


class PlacementFailed(msgspec.Struct, tag=True, frozen=True):
    """From the Ray process: it ends."""

    message: str


class NodeEnded(msgspec.Struct, tag=True, frozen=True):
    """From the Ray process: the agent of a node has ended."""

    message: str


ToRay = PlaceRanks | StartNodes
FromRay = RanksPlaced | PlacementFailed | NodeEnded

TO_RAY: msgspec.msgpack.Decoder[ToRay] = msgspec.msgpack.Decoder(ToRay)
FROM_RAY: msgspec.msgpack.Decoder[FromRay] = msgspec.msgpack.Decoder(FromRay)
