"""Node process: the agent of a machine that has ranks of a model whose head is on another.

It joins the head, starts the ranks that it is given as processes of its own, forwards messages to
them and their answers, and reports their status. When the connection to the head's engine ends, so
do the ranks, and the agent joins the next engine. It ends when the head is gone: when nothing
listens any longer at the port where it joined.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire import env
from quire.config.options import Options, option_specs
from quire.distributed.cluster_secret import ClusterSecret, require_cluster_secret
from quire.distributed.node_address import (
    Endpoint,
    endpoint_of,
    interface_of,
    listen,
    own_address,
    unreachable,
)
from quire.engine.startup.plain_config import to_plain
from quire.engine.supervise.process_pipe import spawn_process
from quire.errors import ConfigError, EngineDead
from quire.executors.local_ranks import LocalRanks
from quire.executors.node_messages import (
    ANSWER_HEADER,
    NODE_OPTIONS,
    NODE_SECTIONS,
    REACH_LIMIT_S,
    STEP_HEADER,
    TO_NODE,
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
    WriteStacks,
    configure,
    encode,
    node_versions,
)
from quire.executors.rank_monitor import CHECK_INTERVAL_S, STACK_SIGNAL, RankMonitor
from quire.platform import cpu

log = logging.getLogger(__name__)

FIRST_CONTACT_S = 600.0
"""Seconds for the head to listen, after the agent was started."""
HEAD_GONE_S = 4.0
"""Seconds without the head, after which the agent ends. With what a connection needs to be found
dead it is below 10."""
PROBE_LIMIT_S = 1.0
MAX_FAILED_HANDSHAKES = 3
"""So many in a row mean that the secrets differ."""
RETRY_LIMIT_S = 1.0
"""A connection that ended before its handshake is tried again at once, or never: what listens there
speaks another protocol."""
LAST_MESSAGE_S = 1.0
"""Seconds for the head's last message, after the connection for steps has ended: a head that ends
in order closes both, and which end arrives first is open."""
_EVENTS = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Stopped(BaseException):
    """A signal has stopped the agent."""


def run_headless(options: Options, *, log_level: str) -> int:
    """Be a node of `quire serve --headless`, until the head is gone or a signal comes.

    Returns the exit status. Raises ConfigError.
    """
    section, environment = options.parallel, env.read()
    if not 0 < section.node_rank < section.nnodes:
        raise ConfigError(
            f"headless with nnodes={section.nnodes} and node_rank={section.node_rank}: a machine "
            "without a server is one of --nnodes N, and its --node-rank is from 1 to N - 1"
        )
    secret = require_cluster_secret(section.cluster_secret_file, environment, "--headless")
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"quire-node-{section.node_rank}")

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        return run_node(
            section.master_addr, section.master_port, section.node_rank, secret.secret, options
        )
    except _Stopped as stopped:
        log.info("%s: this node ends", stopped)
        return 0


def run_node(head: str, port: int, node: int, secret: bytes, options: Options | None = None) -> int:
    """Run the ranks that the head at this address gives to this node, until the head is gone.

    node: number of this one, from 1. options: of this node, which must be those of the head; None:
    those of the head hold. Returns 0 if the head has ended in order, else 1. Raises ConfigError.
    """
    agent = _Agent(
        Endpoint(head, port),
        node,
        ClusterSecret(secret),
        options,
        own_address(head, env.host_address()),
    )
    try:
        return agent.run()
    finally:
        agent.close()


def comparable_options(options: Options) -> dict[str, Any]:
    """Return the options that must be the same on all nodes, as plain values."""
    specs = option_specs()
    return {
        name: msgspec.to_builtins(value, enc_hook=to_plain)
        for name, value in options.non_default().items()
        if name not in NODE_OPTIONS and specs[name].section not in NODE_SECTIONS
    }


class _Agent:
    """Joins one engine of the head after the other."""

    def __init__(
        self,
        head: Endpoint,
        node: int,
        secret: ClusterSecret,
        options: Options | None,
        address: str,
    ) -> None:
        self.head, self.node, self.secret, self.address = head, node, secret, address
        self.options = options
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._seen_at: float | None = None
        self._began_at = time.monotonic()
        self._probed_at = 0.0

    def run(self) -> int:
        log.info("node %d (%s) joins the head at %s", self.node, self.address, self.head)
        while True:
            session = _Session(self)
            try:
                status = session.run()
            except _Stopped as stopped:
                session.report(f"node {self.node} ({self.address}) was stopped by {stopped}")
                raise
            finally:
                session.close()
            if status is not None:
                return status
            log.info("node %d waits for the next engine of the head", self.node)

    def close(self) -> None:
        self.context.term()

    def mark_seen(self) -> None:
        """The head is there."""
        self._seen_at = time.monotonic()

    def lost(self) -> str | None:
        """Look whether the head listens. Returns why this agent should end."""
        now = time.monotonic()
        if now - self._probed_at > PROBE_LIMIT_S:
            self._probed_at = now
            if not unreachable([self.head], PROBE_LIMIT_S):
                self.mark_seen()
        if self._seen_at is None:
            waited = time.monotonic() - self._began_at
            found = f"in {FIRST_CONTACT_S:.0f} s nothing has listened at {self.head}"
            return found if waited > FIRST_CONTACT_S else None
        gone = time.monotonic() - self._seen_at > HEAD_GONE_S
        return f"the head is gone: nothing listens at {self.head}" if gone else None


class _Session:
    """Membership in one engine: a connection, and then ranks."""

    def __init__(self, agent: _Agent) -> None:
        self._agent = agent
        self._probe = listen(agent.address, 0, what="for other nodes; see QUIRE_HOST_IP")
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._control, self._watch = self._connect(agent.head, None)
        self._steps: zmq.Socket[bytes] | None = None
        self._steps_watch: zmq.Socket[bytes] | None = None
        self._connected = False
        self._failed_handshakes = 0
        self._ended_at: float | None = None  # a connection without a handshake
        self._steps_ended_at: float | None = None
        self._local: LocalRanks | None = None
        self._monitor: RankMonitor | None = None
        self._failed_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller.register(self._failed_fd, zmq.POLLIN)
        self._sent_status: object = None

    def _connect(
        self, where: Endpoint, identity: bytes | None
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket, and another that brings the events of its connection."""
        made = self._agent.context.socket(zmq.DEALER)
        configure(made, where.address)
        self._agent.secret.secure_client(made)
        if identity is not None:
            made.setsockopt(zmq.ROUTING_ID, identity)
        made.setsockopt(zmq.RECONNECT_IVL, 200)
        watch = made.get_monitor_socket(_EVENTS)
        made.connect(where.url)
        self._sockets.append(made)
        for one in (made, watch):
            self._poller.register(one, zmq.POLLIN)
        return made, watch

    def run(self) -> int | None:
        """Serve until the engine ends. Returns the exit status; None: another may come."""
        agent = self._agent
        options = None if agent.options is None else comparable_options(agent.options)
        join = JoinNode(agent.node, node_versions(), endpoint_of(self._probe), options)
        if not self._send(join):
            self._ended_at = 0.0
        while True:
            ready = [one for one, _ in self._poller.poll(int(CHECK_INTERVAL_S * 1000))]
            status = self._read_control()  # before the end of the connection
            if status is not None:
                return status if status >= 0 else None
            for watch in (self._watch, self._steps_watch):
                if watch is None or watch not in ready:
                    continue
                if (ended := self._read_event(watch)) is not None:
                    log.warning("%s", ended)
                    return None
            steps_ended = self._steps_ended_at
            if steps_ended is not None and time.monotonic() - steps_ended > LAST_MESSAGE_S:
                log.warning("the connection for steps has ended")
                return None
            if self._failed_handshakes >= MAX_FAILED_HANDSHAKES:
                log.error(
                    "the head at %s refuses this node: the cluster secrets differ", agent.head
                )
                return 1
            if self._ended_at is not None and time.monotonic() - self._ended_at > RETRY_LIMIT_S:
                log.error(
                    "what listens at %s refuses this node: it is no head of quire; see "
                    "--master-addr and --master-port",
                    agent.head,
                )
                return 1
            if self._local is not None:
                self._forward(ready)
            if self._connected:
                agent.mark_seen()
            elif (why := agent.lost()) is not None:
                log.error("%s; this node ends", why)
                return 1

    def _read_event(self, watch: zmq.Socket[bytes]) -> str | None:
        """Read an event of a connection. Returns why the session has ended."""
        event = recv_monitor_message(watch)["event"]
        if event == zmq.EVENT_CONNECT_RETRIED:
            self._ended_at = None
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failed_handshakes = 0
            self._connected = self._connected or watch is self._watch
        elif not self._connected:
            self._failed_handshakes += event != zmq.EVENT_DISCONNECTED
            self._ended_at = time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED and watch is self._steps_watch:
            self._steps_ended_at = time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED:
            self._connected = False
            return "the connection to the head's engine has ended"
        return None

    def _read_control(self) -> int | None:
        """Handle the messages of the head. Returns the exit status; -1: the engine has ended."""
        while True:
            try:
                data = self._control.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self._agent.mark_seen()
            if not data:
                continue
            message = TO_NODE.decode(data)
            if isinstance(message, RefuseNode):
                log.error("the head refuses this node: %s", message.reason)
                return 1
            if isinstance(message, EndRanks):
                log.log(
                    logging.INFO if message.final else logging.WARNING,
                    "the head's engine has ended: %s",
                    message.reason,
                )
                return 0 if message.final else -1
            if isinstance(message, TestPairs):
                self._test_pairs(message.probes)
            elif isinstance(message, StartNode):
                self._start_ranks(message)
            elif isinstance(message, WriteStacks) and self._monitor is not None:
                for process in self._monitor.processes:
                    process.send_signal(STACK_SIGNAL)

    def _test_pairs(self, probes: Sequence[Endpoint]) -> None:
        others = [i for i in range(len(probes)) if i != self._agent.node]
        failures = unreachable([probes[i] for i in others], REACH_LIMIT_S)
        self._send(PairsTested({others[i]: why for i, why in failures.items()}))

    def _start_ranks(self, orders: StartNode) -> None:
        """Start the ranks; report why it cannot be done."""
        agent = self._agent
        count, kind = orders.count, orders.config.device.kind
        where = f"node {agent.node} ({agent.address})"
        devices = [
            f"{kind if kind == cpu.name else f'{kind}:{rank - orders.first_rank}'} of {where}"
            for rank in range(orders.first_rank + count)
        ]
        threads = (env.read().num_threads or cpu.available_cores()) // count
        variables = env.rank_environment(max(1, threads), interface_of(agent.address))

        def spawn(end: socket.socket, fds: Sequence[int]) -> subprocess.Popen[bytes]:
            return spawn_process("quire.engine.startup.rank_process", end, env=variables, fds=fds)

        ranks = range(orders.first_rank, orders.first_rank + count)
        try:
            self._local = LocalRanks(ranks, orders.config.parallel.ranks)
            self._monitor = RankMonitor(
                self._local.page, devices, lambda: None, first_rank=orders.first_rank
            )
            self._monitor.on_failure(lambda: os.eventfd_write(self._failed_fd, 1))
            self._local.start(
                self._monitor,
                spawn,
                self._rank_options(orders.options),
                orders.config,
                first_device=0,
                meeting=orders.meeting,
            )
        except (ConfigError, OSError) as error:
            self.report(f"{where}: {error}")
            return
        for reader in self._local.readers:
            self._poller.register(reader.fileno(), zmq.POLLIN)
        identity = f"node-{agent.node}".encode()
        self._steps, self._steps_watch = self._connect(orders.steps, identity)
        pids = tuple(one.pid for one in self._monitor.processes)
        try:
            self._steps.send(encode(RanksSpawned(agent.node, pids)), zmq.NOBLOCK)
        except zmq.Again:
            self.report(f"{where}: the head refuses it at {orders.steps}")
            return
        log.info("node %d starts ranks %d to %d", agent.node, ranks.start, ranks.stop - 1)

    def _rank_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The head's options, with this node's own places of files."""
        own = {} if self._agent.options is None else self._agent.options.non_default()
        return {**options, **{name: one for name, one in own.items() if name in NODE_OPTIONS}}

    # -- steps ----------------------------------------------------------------------------------

    def _forward(self, ready: Sequence[Any]) -> None:
        """Forward messages and answers; report status and failures."""
        assert self._local is not None
        assert self._monitor is not None
        if self._failed_fd in ready:
            os.eventfd_read(self._failed_fd)
            self.report(self._monitor.failure or "")
            return
        try:
            while self._monitor.failure is None and self._forward_one():
                pass
        except EngineDead:
            return  # the monitor has found a failure: it is reported next
        rows = self._local.page.export(self._local.ranks)
        if rows != self._sent_status:
            self._sent_status = rows
            self._send(NodeStatus(rows))

    def _forward_one(self) -> bool:
        """Forward a message, and an answer of each rank. Returns whether there was any."""
        assert self._local is not None
        assert self._steps is not None
        found = False
        with suppress(zmq.Again):
            header, data = self._steps.recv_multipart(zmq.NOBLOCK)
            (number,) = STEP_HEADER.unpack(header)
            self._local.writer.send(number, data, self._forward_answers)
            found = True
        return self._forward_answers() or found

    def _forward_answers(self) -> bool:
        """Forward the answers that are there. Returns whether there were any. Also while a message
        waits for room: its readers may wait for room for their answers."""
        assert self._local is not None
        assert self._steps is not None
        self._check()
        found = False
        for rank, reader in zip(self._local.ranks, self._local.readers):
            if (answer := reader.take(self._check)) is not None:
                number, data = answer
                self._steps.send_multipart((ANSWER_HEADER.pack(rank, number), data))
                found = True
        return found

    def _check(self) -> None:
        assert self._monitor is not None
        if self._monitor.failure is not None:
            raise EngineDead(self._monitor.failure)

    # -- the end --------------------------------------------------------------------------------

    def _send(self, message: FromNode) -> bool:
        """Queue a message for the head. Returns whether there is a connection, or may be one."""
        try:
            self._control.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # queues are unlimited, so it was refused for good: waiting has no end
            return False
        return True

    def report(self, reason: str) -> None:
        """Report to the head that the ranks of this node have ended."""
        log.error("%s", reason)
        self._send(NodeFailed(reason))

    def close(self) -> None:
        """Kill the ranks, and disconnect."""
        if self._monitor is not None:
            self._monitor.fail("the node ends its ranks")
            self._monitor.close()
        if self._local is not None:
            self._local.end()
            self._local.close()
        for one in self._sockets:
            one.disable_monitor()
            one.close(None if self._connected else 0)  # without a head nothing can be sent
        for watch in (self._watch, self._steps_watch):
            if watch is not None:
                watch.close(0)  # the end of the context waits for all sockets
        self._probe.close()
        os.close(self._failed_fd)
