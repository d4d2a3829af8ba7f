"""Node head: the head's side of a model on several machines. It is on node 0, with rank 0.

    control   one socket for all agents, at the port that they were given: joining, status, failures
    steps     another for messages to ranks and their answers, which only the engine's thread uses

The control socket belongs to the thread that gathers the nodes, and then to that of the rank
monitor. An agent that is gone is found when it cannot be sent to: its connection was closed, or
nothing has come from it for HEARTBEAT_LIMIT_MS.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from quire.config.engine_config import EngineConfig
from quire.distributed.cluster_secret import ClusterSecret
from quire.distributed.node_address import (
    Endpoint,
    address_warnings,
    endpoint_of,
    listen,
    unreachable,
)
from quire.errors import ConfigError, EngineDead
from quire.executors.local_ranks import Meeting
from quire.executors.node_messages import (
    ANSWER_HEADER,
    FROM_NODE,
    REACH_LIMIT_S,
    STEP_HEADER,
    EndRanks,
    FromNode,
    JoinNode,
    NodeFailed,
    NodeStatus,
    PairsTested,
    RanksSpawned,
    RefuseNode,
    StartNode,
    TestPairs,
    ToNode,
    WriteStacks,
    configure,
    encode,
    first_difference,
    node_versions,
)
from quire.executors.rank_status import RankStatusPage

log = logging.getLogger(__name__)

JOIN_LIMIT_S = 600.0
"""Seconds for all nodes to join."""
SPAWN_LIMIT_S = 60.0
"""Seconds for an agent to start the processes of its ranks."""
CHECK_INTERVAL_S = 0.5
FIRST_WAIT_LOG_S = 10.0
"""After this, and after each doubling of it, a line says which nodes are missing."""
_KEEP_ALIVE = b""


@dataclass(slots=True)
class _JoinedNode:
    """Another node that has joined."""

    number: int
    identity: bytes  # of its connection
    probe: Endpoint
    ranks: range
    pids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.probe.address})"


@dataclass(slots=True)
class _AnswerReader:
    """The answers of one rank on another node."""

    receive_some: Callable[[Callable[[], None] | None], None]
    answers: deque[tuple[int, bytes]] = field(default_factory=deque)

    def receive(self, check: Callable[[], None] | None = None) -> tuple[int, bytes]:
        while not self.answers:
            self.receive_some(check)
        return self.answers.popleft()


class NodeHead:
    """The other nodes of a model, as their head has them. The caller must close() it."""

    def __init__(
        self,
        secret: ClusterSecret,
        listener: socket.socket,
        sizes: Sequence[int],
        device: str,
        open_store: Callable[[str, int, int], Any],
    ) -> None:
        """listener: where agents join; it is closed with this. sizes: ranks of each node, this one
        first. device: their kind. open_store: see quire.distributed.collectives.
        """
        self._open_store = open_store
        self._sizes, self._device = sizes, device
        self.ranks = range(sizes[0], sum(sizes))
        self._nodes: dict[int, _JoinedNode] = {}
        self._listener = listener
        self.endpoint = endpoint_of(listener)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = secret.accept_clients(self._context)
        self._control = self._server(secret, listener)
        steps = listen(self.endpoint.address, 0, what="for messages to ranks")
        self._steps_endpoint = endpoint_of(steps)
        self._steps = self._server(secret, steps)
        steps.close()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._steps, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self.readers = [_AnswerReader(self._receive_some) for _ in self.ranks]
        self._page: RankStatusPage | None = None
        self._store: Any = None  # of torch.distributed
        self._checked_at = 0.0
        self._ranks_ended = False
        self._closed = False

    def _server(self, secret: ClusterSecret, listener: socket.socket) -> zmq.Socket[bytes]:
        server = self._context.socket(zmq.ROUTER)
        configure(server, self.endpoint.address)
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secret.secure_server(server)
        server.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))
        server.bind(endpoint_of(listener).url)
        return server

    # -- the start, on the engine's thread ------------------------------------------------------

    def gather(
        self,
        options: dict[str, Any],
        check: Callable[[], None] = lambda: None,
        limit_s: float = JOIN_LIMIT_S,
    ) -> None:
        """Wait until all nodes have joined, and see whether each can reach each other.

        options: of this node, for comparison. check: called meanwhile; what it raises ends the
        wait. Raises ConfigError with the names of nodes.
        """
        began, log_after = time.monotonic(), FIRST_WAIT_LOG_S
        while missing := [i for i in range(1, len(self._sizes)) if i not in self._nodes]:
            check()
            waited = time.monotonic() - began
            names = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            if waited > limit_s:
                raise ConfigError(
                    f"{names} did not join within {limit_s:.0f} s at {self.endpoint}: start each "
                    "with the options of this one, --headless and --node-rank N, and the same "
                    "cluster secret; see its log"
                )
            if waited > log_after:
                log_after *= 2
                log.info("waiting for %s to join at %s", names, self.endpoint)
            for identity, message in self._receive_control(CHECK_INTERVAL_S):
                if isinstance(message, JoinNode):
                    self._admit(identity, message, options)
                elif isinstance(message, NodeFailed):
                    raise ConfigError(f"{self._name_of(identity)}: {message.reason}")
            self._drop_those_gone()
        log.info("all %d nodes have joined", len(self._sizes))
        self._test_pairs()

    def _admit(self, identity: bytes, message: JoinNode, options: dict[str, Any]) -> None:
        """Take a node in, or refuse it. Raises ConfigError if it differs from this one."""
        number, name = message.node, f"node {message.node} ({message.probe.address})"
        if self._refuses(identity, number):
            return
        problem = first_difference(name, node_versions(), message.versions, "version ")
        if problem is None and message.options is not None:
            problem = first_difference(name, options, message.options, "")
        if problem is not None:
            problem += ": all nodes need the same"
            self._send(identity, RefuseNode(problem))
            raise ConfigError(problem)
        first = sum(self._sizes[:number])
        ranks = range(first, first + self._sizes[number])
        self._nodes[number] = _JoinedNode(number, identity, message.probe, ranks)
        log.info("%s has joined", name)

    def _refuses(self, identity: bytes, number: int) -> bool:
        """Refuse a node whose number is of no node, or of one that is there."""
        if not 0 < number < len(self._sizes):
            reason = f"node_rank={number} is not in [1, {len(self._sizes)}), the other nodes"
        elif number in self._nodes and self._send(self._nodes[number].identity, None):
            reason = f"node {number} has joined already, from {self._nodes[number].probe.address}"
        else:
            return False
        log.warning("a node was refused: %s", reason)
        self._send(identity, RefuseNode(reason))
        return True

    def _drop_those_gone(self) -> None:
        for one in list(self._nodes.values()):
            if not self._send(one.identity, None):
                log.warning("%s is gone; waiting for it again", one.name)
                del self._nodes[one.number]

    def _test_pairs(self) -> None:
        """Have each node connect to each other. Raises ConfigError with all that failed."""
        with listen(self.endpoint.address, 0, what="to test the network") as own:
            nodes = [self._nodes[i] for i in sorted(self._nodes)]
            probes = [endpoint_of(own), *(one.probe for one in nodes)]
            for warning in address_warnings([one.address for one in probes]):
                log.warning("%s", warning)
            for one in nodes:
                self._send(one.identity, TestPairs(probes))
            failures = {(0, i + 1): w for i, w in unreachable(probes[1:], REACH_LIMIT_S).items()}
            tested: set[int] = set()
            deadline = time.monotonic() + 2 * REACH_LIMIT_S
            while len(tested) < len(nodes):
                for identity, message in self._receive_control(CHECK_INTERVAL_S):
                    number = self._number_of(identity)
                    if isinstance(message, PairsTested) and number is not None:
                        tested.add(number)
                        failures |= {(number, i): why for i, why in message.failures.items()}
                    elif isinstance(message, NodeFailed):
                        raise ConfigError(f"{self._name_of(identity)}: {message.reason}")
                    elif isinstance(message, JoinNode):
                        self._refuses(identity, message.node)
                for one in nodes:
                    if not self._send(one.identity, None) or time.monotonic() > deadline:
                        raise ConfigError(f"{one.name} is gone, before it could test the network")
        if failures:
            raise ConfigError(
                "; ".join(
                    f"node {a} ({probes[a].address}) cannot connect to node {b} at {probes[b]}: "
                    f"{why}"
                    for (a, b), why in sorted(failures.items())
                )
                + ". All nodes must reach each other at any port: look at firewalls, and at "
                "QUIRE_HOST_IP on each node"
            )

    @property
    def meeting(self) -> Meeting:
        """Where the ranks of this node meet the others."""
        address = self.endpoint.address
        return Meeting(address, self._meeting_port(), address)

    def _meeting_port(self) -> int:
        if self._store is None:
            listener = listen(self.endpoint.address, 0, what="for the ranks to meet")
            where = endpoint_of(listener)
            self._store = self._open_store(where.address, where.port, listener.detach())
        return int(self._store.port)

    def device_names(self) -> list[str]:
        """Return the device of each rank of the other nodes, for messages."""
        names = []
        for one in self._nodes.values():
            for local in range(len(one.ranks)):
                device = self._device if self._device == "cpu" else f"{self._device}:{local}"
                names.append((one.number, f"{device} of {one.name}"))
        return [name for _, name in sorted(names, key=lambda pair: pair[0])]

    def start(self, page: RankStatusPage, options: dict[str, Any], config: EngineConfig) -> None:
        """Have the agents start their ranks. page: gets their status. Raises EngineDead."""
        self._page = page
        for one in self._nodes.values():
            own = Meeting(self.endpoint.address, self._meeting_port(), one.probe.address)
            self._send(
                one.identity,
                StartNode(
                    options, config, one.ranks.start, len(one.ranks), self._steps_endpoint, own
                ),
            )
        deadline = time.monotonic() + SPAWN_LIMIT_S
        while waiting := [one for one in self._nodes.values() if not one.pids]:
            why = self.poll()
            if why is None and time.monotonic() > deadline:
                why = f"{waiting[0].name} has not started its ranks in {SPAWN_LIMIT_S:.0f} s"
            if why is not None:
                raise EngineDead(why)
            if self._steps.poll(int(CHECK_INTERVAL_S * 1000)):
                _, data = self._steps.recv_multipart()
                message = FROM_NODE.decode(data)
                assert isinstance(message, RanksSpawned), message
                self._nodes[message.node].pids = message.pids

    # -- steps, on the engine's thread ----------------------------------------------------------

    def send(self, number: int, data: bytes, check: Callable[[], None]) -> None:
        """Send a message to all ranks of other nodes. Raises OSError if one is gone."""
        header = STEP_HEADER.pack(number)
        for one in self._nodes.values():
            try:
                self._steps.send_multipart((_steps_identity(one.number), header, data))
            except zmq.ZMQError as error:
                raise OSError(f"{one.name} is gone: {error}") from None

    def _receive_some(self, check: Callable[[], None] | None) -> None:
        """Wait for answers of any rank, or for wake()."""
        if check is not None:
            check()
        for ready, _ in self._poller.poll():
            if ready == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                continue
            while True:
                try:
                    _, header, data = self._steps.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                rank, number = ANSWER_HEADER.unpack(header)
                self.readers[rank - self.ranks.start].answers.append((number, data))

    def wake(self) -> None:
        """End the wait for an answer: its check is called."""
        os.eventfd_write(self._wake_fd, 1)

    # -- on the monitor's thread ----------------------------------------------------------------

    def fileno(self) -> int:
        return int(self._control.getsockopt(zmq.FD))

    def poll(self) -> str | None:
        """Read what the agents report. Returns why the ranks of a node have failed."""
        why = self._find_gone()
        for identity, message in self._receive_control(0):
            if isinstance(message, NodeStatus):
                self._update_page(identity, message)
            elif isinstance(message, NodeFailed):
                why = message.reason
            elif isinstance(message, JoinNode):
                self._refuses(identity, message.node)
        return why

    def _find_gone(self) -> str | None:
        if (now := time.monotonic()) < self._checked_at + CHECK_INTERVAL_S / 2:
            return None
        self._checked_at = now
        for one in self._nodes.values():
            if not self._send(one.identity, None):
                ranks = ", ".join(map(str, one.ranks))
                return (
                    f"{one.name} is gone: its connection is closed, or it does not answer; it had "
                    f"rank{'s' * (len(one.ranks) > 1)} {ranks}"
                )
        return None

    def _update_page(self, identity: bytes, message: NodeStatus) -> None:
        number = self._number_of(identity)
        if number is None or self._page is None:
            return
        for rank, (row, error) in zip(self._nodes[number].ranks, message.rows, strict=True):
            self._page.put(rank, row, error)

    def pid(self, rank: int) -> int:
        one = next(one for one in self._nodes.values() if rank in one.ranks)
        return one.pids[rank - one.ranks.start]

    def write_stacks(self) -> None:
        for one in self._nodes.values():
            self._send(one.identity, WriteStacks())

    def end_ranks(self, reason: str) -> None:
        """Have all ranks killed; the agents join again."""
        self._ranks_ended = True
        for one in self._nodes.values():
            self._send(one.identity, EndRanks(reason))

    # -- any time -------------------------------------------------------------------------------

    def _send(self, identity: bytes, message: ToNode | None) -> bool:
        """Send a message; None: none, to see whether the agent is there. Returns whether it is."""
        data = _KEEP_ALIVE if message is None else encode(message)
        try:
            self._control.send_multipart((identity, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _receive_control(self, timeout_s: float) -> Iterator[tuple[bytes, FromNode]]:
        if timeout_s and not self._control.poll(int(timeout_s * 1000)):
            return
        while True:
            try:
                identity, data = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue  # not of an agent
            try:
                yield identity, FROM_NODE.decode(data)
            except msgspec.DecodeError as error:
                log.warning("cannot decode a message of a node: %s", error)

    def _number_of(self, identity: bytes) -> int | None:
        return next((i for i, one in self._nodes.items() if one.identity == identity), None)

    def _name_of(self, identity: bytes) -> str:
        number = self._number_of(identity)
        return "a node" if number is None else self._nodes[number].name

    def close(self) -> None:
        """Have the agents end, unless the ranks have failed. Harmless when called again."""
        if self._closed:
            return
        self._closed = True
        if not self._ranks_ended:
            for one in self._nodes.values():
                self._send(one.identity, EndRanks("the engine was shut down", final=True))
        self._control.close()
        self._steps.close(0)
        self._authenticator.stop()
        self._context.term()
        self._listener.close()
        self._store = None
        os.close(self._wake_fd)


def _steps_identity(node: int) -> bytes:
    return f"node-{node}".encode()
