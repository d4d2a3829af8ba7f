"""Engine node: `quire serve --headless` with engines that join the pool of a head.

It joins first, so that other options are refused before weights are read. It ends with the head, or
when that is gone; at SIGTERM its engines get no new requests, and their streams end or move.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from types import FrameType

import zmq

from quire import env
from quire.config.data_parallel import EngineLayout
from quire.config.options import Options
from quire.distributed.cluster_secret import ClusterSecret, is_loopback
from quire.distributed.node_address import own_address
from quire.engine.client.zmq_transport import tcp_address
from quire.engine.cluster.engine_link import (
    BEAT_INTERVAL_S,
    configure_link,
    engine_versions,
    shared_options,
)
from quire.engine.heartbeat_page import HeartbeatReader
from quire.engine.supervise.engine_group import EngineGroup
from quire.engine.supervise.process_pipe import (
    ChildProcess,
    ClientGone,
    ControlMessage,
    EngineDraining,
    EngineStarted,
    EngineTerminated,
    EngineUnavailable,
    JoinAnswer,
    JoinEngines,
    LinkBeat,
    NodeLost,
    NodeStarted,
    RestartEngine,
    StopProcess,
    decode,
    encode,
)
from quire.errors import ConfigError

log = logging.getLogger(__name__)

HEAD_LIMIT_S = 5.0
"""The node ends when it has received nothing from the head for so long."""
JOIN_LIMIT_S = 600.0
"""The same before it has joined."""
JOIN_LOG_S = 5.0
MOVE_GRACE_S = 5.0
"""Beyond the time that streams have to end, for those that move."""


class EngineNode:
    """The engines of this node, and the link to their head."""

    def __init__(
        self,
        options: Options,
        layout: EngineLayout,
        secret: ClusterSecret | None,
        *,
        log_level: str,
        log_style: str,
        drain_s: float,
    ) -> None:
        """drain_s: time that streams have to end after SIGTERM. Raises ConfigError."""
        assert layout.address is not None, layout
        self._layout, self._drain_s = layout, drain_s
        self._head = tcp_address(layout.address, layout.port)
        host = own_address(layout.address, env.host_address())
        if secret is None and not is_loopback(host):
            raise ConfigError(
                f"engines on {host} need a secret that all machines share: --cluster-secret-file "
                "FILE or QUIRE_CLUSTER_SECRET; make one with `openssl rand -hex 32`"
            )
        self._join = JoinEngines(
            first_rank=layout.local.start,
            count=len(layout.local),
            host=host,
            versions=engine_versions(),
            options=shared_options(options),
        )
        self._group = EngineGroup(
            layout.local_options(options),
            env.read().cache_dir,
            log_level=log_level,
            log_style=log_style,
            listen_host=host,
            cluster_secret=None if secret is None else secret.secret.decode(),
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_link(self._socket, self._head, secret, server=False)
        self._children: dict[int, ChildProcess] = {}  # by the descriptor of its pipe
        self._heard_at = self._logged_at = time.monotonic()
        self._has_joined = self._has_started = False
        self._ends_at: float | None = None  # draining
        self._drained_from = 0.0  # no new requests come from then on
        self._signals = 0
        self._status: int | None = None
        self._next_check_at = 0.0

    def run(self) -> int:
        """Run until the head or a signal ends it; the exit status. Raises errors of the start."""
        ear, mouth = socket.socketpair()
        for one in (ear, mouth):
            one.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        fd = signal.set_wakeup_fd(mouth.fileno())
        try:
            self._socket.connect(self._head)
            self._send(self._join)
            while self._status is None:
                self._run_once(ear)
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._has_joined:
                self._send(NodeLost(reason="it was ended"))
                self._group.stop()
            self._socket.close()
            self._context.term()
            ear.close()
            mouth.close()
        return self._status or 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _run_once(self, ear: socket.socket) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(ear.fileno(), zmq.POLLIN)
        for fd in self._children:
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(int(BEAT_INTERVAL_S * 1000)))
        if ear.fileno() in ready:
            ear.recv(64)
        while self._status is None and self._read_head():
            pass
        for fd in [fd for fd in self._children if fd in ready]:
            self._handle_engine(fd)
        self._check()

    def _check(self) -> None:
        """Do what is due by the clock, and what signals ask for."""
        now = time.monotonic()
        if self._signals:
            self._begin_end(now)
        limit = HEAD_LIMIT_S if self._has_joined else JOIN_LIMIT_S
        if now - self._heard_at > limit and self._status is None:
            log.error("the head at %s is gone: nothing was received for %g s", self._head, limit)
            self._status = 1
        if not self._has_joined and now - self._logged_at >= JOIN_LOG_S:
            self._logged_at = now
            log.info(
                "waiting for the head at %s; if it runs, check its port and that both have the "
                "same cluster secret",
                self._head,
            )
        if self._ends_at is not None and (now >= self._ends_at or self._is_idle()):
            self._status = self._status or 0
        if self._has_started and now >= self._next_check_at:
            self._next_check_at = now + (self._group.check_interval_s or BEAT_INTERVAL_S)
            for engine, why in self._group.check_liveness():
                self._group.restart(engine, why)

    # -- its end --------------------------------------------------------------------------------

    def _begin_end(self, now: float) -> None:
        """The first signal: no new requests. The second: end now."""
        if not self._has_started or (self._ends_at is not None and self._signals > 1):
            self._status = 0
        elif self._ends_at is None:
            log.info("no new requests; streams that are open after %g s move", self._drain_s)
            self._ends_at = now + self._drain_s + MOVE_GRACE_S
            for engine in range(len(self._group)):
                self._send(EngineDraining(engine=engine, move_after_s=self._drain_s))
            self._signals = 1
            self._drained_from = now + 2 * BEAT_INTERVAL_S  # requests that were on their way

    def _is_idle(self) -> bool:
        pages = (HeartbeatReader(one.fileno()).read() for one in self._group.heartbeat_files)
        return time.monotonic() > self._drained_from and not any(one.requests for one in pages)

    # -- the head -------------------------------------------------------------------------------

    def _send(self, message: ControlMessage) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    def _read_head(self) -> bool:
        """Handle one message of the head. Returns False if there is none."""
        try:
            message = decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        self._heard_at = time.monotonic()
        if isinstance(message, JoinAnswer):
            if message.refusal is not None:
                raise ConfigError(f"the head refuses this node: {message.refusal}")
            if not self._has_joined:
                self._start_engines()
        elif isinstance(message, StopProcess):
            log.info("the head ends")
            self._status = 0
        elif isinstance(message, RestartEngine):
            self._group.restart(message.engine, message.reason)
        elif isinstance(message, ClientGone):
            self._group.remove_client(message.client_name)
        else:
            assert isinstance(message, LinkBeat), message
        return True

    def _start_engines(self) -> None:
        self._has_joined = True
        self._group.start()
        for child in self._group.children:
            self._children[child.pipe.fileno()] = child

    # -- its engines ----------------------------------------------------------------------------

    def _handle_engine(self, fd: int) -> None:
        child = self._children[fd]
        message = child.pipe.receive()
        if message is None:
            self._on_exit(fd)
            return
        answer = self._group.handle(child, message)
        if isinstance(answer, EngineStarted):
            self._has_started = True
            log.info("engines %s accept requests", ", ".join(map(str, self._layout.local)))
            self._send(NodeStarted(config=answer.config, addresses=answer.addresses))
        elif answer is not None and self._has_started:
            self._send(answer)
        if child.pipe.has_message:
            self._handle_engine(fd)

    def _on_exit(self, fd: int) -> None:
        """The process of an engine is gone: the head learns of it, and of its successor."""
        child = self._children.pop(fd)
        if self._status is not None:
            return
        answer, successor = self._group.on_exit(child)
        if self._has_started:
            self._send(answer)
        if successor is not None:
            self._children[successor.pipe.fileno()] = successor
        elif self._group.is_lost:
            assert isinstance(answer, (EngineTerminated, EngineUnavailable)), answer
            log.error("no engine is left: %s", answer.reason)
            self._status = 1
