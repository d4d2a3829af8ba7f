"""ZeroMQ transport: carries messages between an EngineClient and the engine's process.

The event loop reads a DEALER socket; there is no further thread. ZeroMQ's file descriptor is edge
triggered: a reader must read until nothing is left, and a sender must check for messages again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from quire.engine import message_codec
from quire.engine.messages import (
    PROTOCOL_VERSION,
    EngineDeadMessage,
    Hello,
    MessageFromEngine,
    MessageToEngine,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    EngineRestored,
    EngineTerminated,
    EngineUnavailable,
    ProcessPipe,
    RestartEngine,
)
from quire.errors import EngineDead, EngineError

log = logging.getLogger(__name__)

HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 1000, 4000
"""Interval in which both ends of a connection between machines probe it, and when it is lost."""
MAX_READS_PER_CALLBACK = 64
"""Messages that are read before other callbacks of the event loop run."""


def engine_address(folder: str | Path) -> str:
    """The address at which the engine of this folder listens."""
    return f"ipc://{folder}/engine"


def tcp_address(host: str, port: int | str) -> str:
    """The address of a port of a machine. port: "*" is any free one."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def configure_tcp(socket: zmq.Socket[bytes], address: str) -> None:
    """Set what sockets between machines share, before they are bound or connected."""
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.set_hwm(0)  # unlimited: a full queue would drop messages
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LIMIT_MS)


class EngineEvents:
    """What the process that watches the engines reports, for the transport of each.

    pipe: brings EngineUnavailable, EngineRestored and EngineTerminated; its end means that the
    process at the other end is gone. on_message: called with all other messages of the pipe.
    """

    def __init__(
        self,
        pipe: ProcessPipe,
        *,
        on_message: Callable[[AnyControlMessage], None] | None = None,
        gone: str = "the engine's process is gone",
    ) -> None:
        self.pipe = pipe
        self._on_message = on_message
        self._gone_reason = gone
        self._transports: dict[int, ZmqTransport] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, engine: int, transport: ZmqTransport) -> None:
        """Report events of an engine to its transport, on the running event loop."""
        self._transports[engine] = transport
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.pipe.fileno(), self._read)
            if self.pipe.has_message:
                self._loop.call_soon(self._read)

    def detach(self, engine: int) -> None:
        """Report nothing to it any longer."""
        self._transports.pop(engine, None)
        if not self._transports and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self.pipe.fileno())
            self._loop = None

    def restart(self, engine: int, reason: str) -> None:
        """Have the engine killed and another started."""
        self.pipe.send(RestartEngine(reason=reason, engine=engine))

    def _read(self) -> None:
        """Handle the messages of the pipe, or its end."""
        if self._loop is None:
            return
        message = self.pipe.receive()
        while message is not None:
            if isinstance(message, (EngineTerminated, EngineUnavailable, EngineRestored)):
                if (transport := self._transports.get(message.engine)) is not None:
                    transport.handle_event(message)
            elif self._on_message is not None:
                self._on_message(message)
            if not self.pipe.has_message:
                return
            message = self.pipe.receive()
        self._loop.remove_reader(self.pipe.fileno())
        for engine, transport in list(self._transports.items()):
            transport.handle_event(EngineTerminated(reason=self._gone_reason, engine=engine))


class ZmqTransport:
    """Carries messages between an EngineClient and an engine's process.

    events: of the process that watches the engine; None: it is not replaced. engine: its number
    there.
    """

    def __init__(
        self,
        address: str,
        name: str,
        events: EngineEvents | None = None,
        engine: int = 0,
    ) -> None:
        """address: of the engine; it may be set later, before start()."""
        self.address = address
        self._name = name
        self._events, self._engine = events, engine
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None  # while there is an engine

    def start(
        self,
        deliver: Callable[[MessageFromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[EngineUnavailable], None],
        back: Callable[[], None],
    ) -> None:
        """Start. All four callbacks are called on the running event loop."""
        assert self._context is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._deliver: Callable[[MessageFromEngine], None] = deliver
        self._on_dead: Callable[[EngineDead], None] = die
        self._on_unavailable: Callable[[EngineUnavailable], None] = away
        self._on_restored: Callable[[], None] = back
        self._context = zmq.Context()
        self._connect()
        if self._events is not None:
            self._events.attach(self._engine, self)

    def _connect(self) -> None:
        """Open a new socket: no message for one engine reaches another."""
        assert self._context is not None, "start() comes first"
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._name.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._configure(self._socket)
        self._socket.connect(self.address)
        self._loop.add_reader(self._socket.FD, self._read)
        self.send(Hello(PROTOCOL_VERSION, self._name))

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """Set options of a socket before it is connected."""
        socket.set_hwm(0)  # unlimited: a full queue would drop or block
        socket.setsockopt(zmq.RECONNECT_IVL, 10)

    def _disconnect(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.FD)
            self._socket.close()
            self._socket = None

    def restart(self, reason: str) -> None:
        """Kill the engine, whatever it does, and start another."""
        if self._events is None:
            raise EngineError(f"this process cannot restart the engine ({reason})")
        self._events.restart(self._engine, reason)

    def send(self, message: MessageToEngine) -> None:
        """Send a message, if there is an engine. Raises RequestError if it cannot be encoded."""
        if self._socket is None:
            return
        frames = message_codec.encode_to_engine(message)
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
        # Sending has reset the file descriptor, also where a message has arrived.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    async def stop(self) -> None:
        """Disconnect."""
        self.close()

    def close(self) -> None:
        """Disconnect, also when the event loop is closed. The engine's process is not stopped."""
        if self._context is None:
            return
        self._disconnect()
        if self._events is not None:
            self._events.detach(self._engine)
        self._context.term()
        self._context = None
        self._deliver = self._on_dead = self._on_unavailable = self._on_restored = _ignore

    def _read(self) -> None:
        for _ in range(MAX_READS_PER_CALLBACK):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        """Deliver one message. Returns False if there is none."""
        if self._socket is None:
            return False
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = message_codec.decode_from_engine(data)
        except msgspec.DecodeError as error:
            log.error("cannot decode a message of the engine: %s", error)  # noqa: TRY400 no trace
            self._on_dead(EngineDead(f"a message of the engine cannot be decoded: {error}"))
            return False
        if (
            not isinstance(message, EngineDeadMessage)
            or self._events is None
            or message.version_mismatch
        ):
            self._deliver(message)  # otherwise an event reports the death
        return True

    def _handle_unavailable(self, message: EngineUnavailable) -> None:
        """Deliver the last messages of the engine, and disconnect."""
        while self._read_one():
            pass
        self._disconnect()
        self._on_unavailable(message)

    def handle_event(self, event: EngineUnavailable | EngineRestored | EngineTerminated) -> None:
        """The engine is gone, for good or not, or another is ready."""
        if isinstance(event, EngineTerminated):
            self._on_dead(EngineDead(event.reason))
        elif isinstance(event, EngineUnavailable):
            self._handle_unavailable(event)
        else:
            self.address = event.address
            self._connect()
            self._on_restored()


def _ignore(*_: object) -> None:
    """The callback of a closed transport, which does not keep its client alive."""
