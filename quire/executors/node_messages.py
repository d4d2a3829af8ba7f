"""Node messages: between the head of a model on several machines and the agents of the others.

All of them travel over connections that the cluster secret authenticates and encrypts. The numbered
messages to ranks (rank_group) and their answers have a connection of their own.
"""

from __future__ import annotations

import platform
import struct
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import zmq

from quire.config.engine_config import EngineConfig
from quire.distributed.node_address import Endpoint
from quire.executors.local_ranks import Meeting

PROTOCOL = 1
HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 1000, 3000
"""Interval in which both ends of a connection look for the other, and how long they wait for it."""
REACH_LIMIT_S = 10.0
"""Seconds for a connection to another node."""
STEP_HEADER = struct.Struct("!q")  # number of the message
ANSWER_HEADER = struct.Struct("!qq")  # rank, and number of the message
_NODE_OPTIONS = """model tokenizer hf_config_path download_dir hf_token headless node_rank
    master_addr cluster_secret_file"""
NODE_OPTIONS = frozenset(_NODE_OPTIONS.split())
"""Options that each node has for itself."""
NODE_SECTIONS = frozenset(("observe", "recovery", "health"))
"""Sections of options that concern the head alone."""


class JoinNode(msgspec.Struct, tag=True, frozen=True):
    """From an agent, first: it has a node."""

    node: int
    versions: dict[str, str]
    probe: Endpoint  # a port at which it listens, to test which nodes reach it
    options: dict[str, Any] | None  # of its command line; None: it has those of the head


class PairsTested(msgspec.Struct, tag=True, frozen=True):
    """From an agent: which nodes it cannot connect to, and why."""

    failures: dict[int, str]


class RanksSpawned(msgspec.Struct, tag=True, frozen=True):
    """From an agent, through the connection for steps: its ranks are processes."""

    node: int
    pids: tuple[int, ...]


class NodeStatus(msgspec.Struct, tag=True, frozen=True):
    """From an agent: the rows of its ranks in the status page, and their errors."""

    rows: list[tuple[bytes, bytes]]


class NodeFailed(msgspec.Struct, tag=True, frozen=True):
    """From an agent: its ranks have ended, or will not start."""

    reason: str


class RefuseNode(msgspec.Struct, tag=True, frozen=True):
    """To an agent: it cannot take part, now or later."""

    reason: str


class TestPairs(msgspec.Struct, tag=True, frozen=True):
    """To an agent: connect to the other nodes. By node; the head is the first."""

    probes: list[Endpoint]


class StartNode(msgspec.Struct, tag=True, frozen=True):
    """To an agent: start ranks."""

    options: dict[str, Any]  # of quire.config.options, flat
    config: EngineConfig
    first_rank: int
    count: int
    steps: Endpoint  # where messages for ranks come from
    meeting: Meeting


class WriteStacks(msgspec.Struct, tag=True, frozen=True):
    """To an agent: have the ranks write their stacks to the log."""


class EndRanks(msgspec.Struct, tag=True, frozen=True):
    """To an agent: kill the ranks. final: there will be no others."""

    reason: str
    final: bool = False


FromNode = JoinNode | PairsTested | RanksSpawned | NodeStatus | NodeFailed
ToNode = RefuseNode | TestPairs | StartNode | WriteStacks | EndRanks

encode = msgspec.msgpack.Encoder().encode
FROM_NODE: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


def configure(socket: zmq.Socket[bytes], address: str) -> None:
    """Set what all these sockets share, before they are bound or connected."""
    socket.setsockopt(zmq.IPV6, int(":" in address))
    socket.setsockopt(zmq.LINGER, HEARTBEAT_LIMIT_MS)  # for last messages; a dead peer ends it
    socket.set_hwm(0)  # unlimited: a full queue would drop messages
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LIMIT_MS)


def node_versions() -> dict[str, str]:
    """Return what all nodes must have the same of."""
    found = {"protocol": str(PROTOCOL), "Python": ".".join(platform.python_version_tuple()[:2])}
    for name, packages in (
        ("quire", ("quire-llm",)),
        ("torch", ("torch",)),
        ("NCCL", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    ):
        found[name] = "none"
        for package in packages:
            try:
                found[name] = version(package)
                break
            except PackageNotFoundError:
                continue
    return found


def first_difference(
    node: str, own: dict[str, Any], other: dict[str, Any], what: str
) -> str | None:
    """Name the first key with another value on a node than here. A missing one is the default."""
    for name in sorted({*own, *other}):
        here, there = own.get(name, "its default"), other.get(name, "its default")
        if here != there:
            return f"{node} has {what}{name}={there}, and node 0 (the head) {here}"
    return None
