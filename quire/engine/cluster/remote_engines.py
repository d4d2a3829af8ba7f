"""Remote engines: those of a head that other nodes start. A thread owns the socket of the nodes.

    supervisor ── pipe ── thread ── ROUTER ◀── DEALER, one of each node (engine_node)

A node that is gone is found when it cannot be sent to: its connection was closed, or ZeroMQ has
received nothing from it for some seconds. A node that comes again, restarted, gets its ranks again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import msgspec
import zmq

from quire.config.data_parallel import EngineLayout
from quire.config.engine_config import EngineConfig
from quire.config.options import Options
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.client.zmq_transport import tcp_address
from quire.engine.cluster.engine_link import (
    BEAT_INTERVAL_S,
    config_difference,
    configure_link,
    difference,
    engine_versions,
    shared_options,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    ClientGone,
    ControlMessage,
    EngineDraining,
    EngineRestored,
    EngineStarted,
    EngineTerminated,
    EngineUnavailable,
    JoinAnswer,
    JoinEngines,
    LinkBeat,
    NodeLost,
    NodeStarted,
    ProcessPipe,
    RestartEngine,
    StopProcess,
    decode,
    encode,
)
from quire.errors import ConfigError

log = logging.getLogger(__name__)

RETURN_EXPECTED_S = 30.0
"""A node that is gone is taken to be back after so long."""
WAIT_LOG_S = 10.0


class _Node(NamedTuple):
    """A node that has joined."""

    host: str
    ranks: range

    @property
    def name(self) -> str:
        return f"node {self.host} (engines {self.ranks[0]} to {self.ranks[-1]})"


class RemoteEngines:
    """The engines of other nodes. The caller reads `pipe`, and must call stop()."""

    def __init__(
        self, layout: EngineLayout, options: Options, secret: ClusterSecret | None
    ) -> None:
        """options: of this node; those of others must agree. Raises ConfigError."""
        assert layout.address is not None, layout
        self.ranks = layout.remote
        self._config: EngineConfig | None = None  # of the head's own engines
        self._options, self._versions = shared_options(options), engine_versions()
        self._nodes: dict[bytes, _Node] = {}  # by the identity of its connection
        self._started: dict[bytes, NodeStarted] = {}  # ready, before the head's own config is known
        self.pipe, theirs = ProcessPipe.create_pair()
        self._peer = ProcessPipe(theirs)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a node that is gone raises
        self._address = tcp_address(layout.address, layout.port)
        self._authenticator = None if secret is None else secret.accept_clients(self._context)
        configure_link(self._socket, self._address, secret, server=True)
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(
                f"cannot listen at {layout.address}:{layout.port} (data_parallel_address, "
                f"data_parallel_rpc_port): {error}; it must be an address of this machine, and a "
                "free port"
            ) from None
        self._next_beat_at = self._next_log_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="quire-nodes", daemon=True)
        self._thread.start()

    def send(self, message: ControlMessage) -> None:
        """Send RestartEngine or ClientGone to the nodes that it concerns."""
        self.pipe.try_send(message)

    def set_config(self, config: EngineConfig) -> None:
        """The head's own engines have this config. Called once."""
        self.pipe.send(EngineStarted(config=config, startup_seconds={}))

    def stop(self) -> None:
        """End all nodes. Harmless when called again."""
        if self._thread.is_alive():
            self.pipe.try_send(StopProcess())
            self._thread.join()
        self.pipe.close()

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._peer.fileno(), zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(int(BEAT_INTERVAL_S * 1000)))
                if self._peer.fileno() in ready and not self._handle_supervisor():
                    return
                while self._read_node():
                    pass
                self._send_beats()
        finally:
            for identity in list(self._nodes):
                self._send(identity, StopProcess())
            self._close()
            self._peer.close()

    def _close(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _send_beats(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat_at:
            self._next_beat_at = now + BEAT_INTERVAL_S
            for identity in list(self._nodes):
                self._send(identity, LinkBeat())
        if now >= self._next_log_at:
            self._next_log_at = now + WAIT_LOG_S
            missing = set(self.ranks).difference(*(one.ranks for one in self._nodes.values()))
            if missing:
                ranks = ", ".join(map(str, sorted(missing)))
                log.info("waiting for nodes with engines %s to join at %s", ranks, self._address)

    def _send(self, identity: bytes, message: ControlMessage) -> None:
        try:
            self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH
            if identity in self._nodes:
                self._lose(identity, "its connection was lost")

    def _lose(self, identity: bytes, why: str) -> None:
        node = self._nodes.pop(identity)
        self._started.pop(identity, None)
        log.error("%s is lost: %s", node.name, why)
        for rank in node.ranks:
            self._peer.send(
                EngineUnavailable(
                    reason=f"{node.name} is lost: {why}",
                    expected_restart_s=RETURN_EXPECTED_S,
                    running_ids=[],  # no request is to blame
                    engine=rank,
                )
            )

    def _handle_supervisor(self) -> bool:
        """Handle one message of the supervisor. Returns False to stop."""
        message = self._peer.receive()
        if isinstance(message, EngineStarted):
            self._config = message.config
            for identity, started in list(self._started.items()):
                self._on_started(identity, started)
        elif isinstance(message, RestartEngine):
            for identity, node in list(self._nodes.items()):
                if message.engine in node.ranks:
                    engine = message.engine - node.ranks[0]
                    self._send(identity, msgspec.structs.replace(message, engine=engine))
        elif isinstance(message, ClientGone):
            for identity in list(self._nodes):
                self._send(identity, message)
        else:
            return False
        return True

    def _read_node(self) -> bool:
        """Handle one message of a node. Returns False if there is none."""
        try:
            identity, data = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        except ValueError:
            return True
        try:
            message = decode(data)
        except msgspec.DecodeError as error:
            self._send(identity, JoinAnswer(refusal=f"a message cannot be decoded: {error}"))
            return True
        if isinstance(message, JoinEngines):
            self._on_join(identity, message)
        elif identity in self._nodes:
            self._on_message(identity, message)
        return True

    def _on_join(self, identity: bytes, asked: JoinEngines) -> None:
        ranks = range(asked.first_rank, asked.first_rank + asked.count)
        refusal = self._refusal(asked, ranks)
        if refusal is None:
            self._nodes[identity] = _Node(asked.host, ranks)
            log.info("%s has joined", self._nodes[identity].name)
        else:
            log.error("a node at %s is refused: %s", asked.host, refusal)
        self._send(identity, JoinAnswer(refusal=refusal))

    def _refusal(self, asked: JoinEngines, ranks: range) -> str | None:
        for own, theirs, what in (
            (self._versions, asked.versions, "versions"),
            (self._options, asked.options, "options"),
        ):
            found = difference(theirs, own)
            if found is not None:
                return f"the {what} differ: {found}"
        if not ranks or ranks[0] not in self.ranks or ranks[-1] not in self.ranks:
            return (
                f"data_parallel_start_rank={asked.first_rank} with {asked.count} engines: the head "
                f"expects ranks in [{self.ranks[0]}, {self.ranks[-1]}]"
            )
        for node in self._nodes.values():
            both = sorted(set(ranks) & set(node.ranks))
            if both:
                return f"engine {both[0]} is of {node.name}: see data_parallel_start_rank"
        return None

    def _on_message(self, identity: bytes, message: AnyControlMessage) -> None:
        first = self._nodes[identity].ranks[0]
        if isinstance(message, NodeStarted):
            self._on_started(identity, message)
        elif isinstance(message, NodeLost):
            self._lose(identity, message.reason)
        elif isinstance(message, EngineTerminated):  # until the node is restarted
            self._peer.send(
                EngineUnavailable(
                    reason=message.reason,
                    expected_restart_s=RETURN_EXPECTED_S,
                    engine=first + message.engine,
                )
            )
        elif isinstance(message, (EngineUnavailable, EngineRestored, EngineDraining)):
            self._peer.send(msgspec.structs.replace(message, engine=first + message.engine))

    def _on_started(self, identity: bytes, started: NodeStarted) -> None:
        if self._config is None:  # the head's own engines are not ready
            self._started[identity] = started
            return
        node = self._nodes[identity]
        found = config_difference(started.config, self._config)
        if found is not None:
            why = f"the configs of the engines differ: {found}"
            self._send(identity, JoinAnswer(refusal=why))
            self._lose(identity, why)
            return
        for rank, address in zip(node.ranks, started.addresses):
            self._peer.send(EngineRestored(address=address, engine=rank))
