"""The engine's process, seen from a process that speaks to people: a transport over ZeroMQ.

A DEALER socket, read by the event loop itself: no thread of Python's runs beside it. The one thing
to know: ZeroMQ's file descriptor tells of changes and not of states, so whoever was told reads
until there is nothing left, and whoever sends looks once more.
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

MAX_READS_PER_CALLBACK = 64
"""Messages that are read before others on the event loop have their turn."""


def engine_address(folder: str | Path) -> str:
    """Where the engine of this folder listens."""
    return f"ipc://{folder}/engine"


class ZmqTransport:
    """A transport: carries messages between an EngineClient and an engine's process.

    link: tells of the death of the engine (an Away word; Back when another is there; Died), and by
    its own end of that of whoever holds the other. Without one, nobody tells. on_word: is called
    with the other words that come over it.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        link: ProcessPipe | None = None,
        *,
        on_word: Callable[[AnyControlMessage], None] | None = None,
        gone: str = "the engine's process is gone",
    ) -> None:
        self._address = engine_address(folder)
        self._name = name
        self._pipe = link
        self._on_control_message = on_word
        self._gone_reason = gone
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None  # while there is an engine

    def start(
        self,
        deliver: Callable[[MessageFromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[EngineUnavailable], None],
        back: Callable[[], None],
    ) -> None:
        """Begin. All four are called on the running event loop."""
        assert self._context is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._deliver, self._on_dead, self._on_unavailable, self._on_restored = (
            deliver,
            die,
            away,
            back,
        )
        self._context = zmq.Context()
        self._connect()
        if self._pipe is not None:
            self._loop.add_reader(self._pipe.fileno(), self._read_pipe)
            if self._pipe.has_message:
                self._loop.call_soon(self._read_pipe)

    def _connect(self) -> None:
        """A socket of its own for each engine: nothing meant for one reaches another."""
        assert self._context is not None, "start() comes first"
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._name.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)  # a queue that is full would drop or block; neither may be
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.FD, self._read)
        self.send(Hello(PROTOCOL_VERSION, self._name))

    def _disconnect(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.FD)
            self._socket.close()
            self._socket = None

    def restart(self, reason: str) -> None:
        """Have the engine ended, whatever it does, and another started."""
        if self._pipe is None:
            raise EngineError(f"nobody is there to restart the engine ({reason})")
        self._pipe.send(RestartEngine(reason=reason))

    def send(self, message: MessageToEngine) -> None:
        """To nobody, while there is no engine. Raises RequestError for what cannot travel."""
        if self._socket is None:
            return
        self._socket.send(message_codec.encode(message), zmq.NOBLOCK)
        if (
            int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN
        ):  # sending has used up the sign that there is news
            self._loop.call_soon(self._read)

    async def stop(self) -> None:
        """Hang up."""
        self.close()

    def close(self) -> None:
        """Hang up; also when the event loop is closed. The process goes on without us."""
        if self._context is None:
            return
        self._disconnect()
        if self._pipe is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pipe.fileno())
        self._context.term()
        self._context = None

    def _read(self) -> None:
        for _ in range(MAX_READS_PER_CALLBACK):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        """False: nothing is there."""
        if self._socket is None:
            return False
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = message_codec.decode_from_engine(data)
        except msgspec.DecodeError as error:
            log.error("cannot read what the engine says: %s", error)  # noqa: TRY400 no trace
            self._on_dead(EngineDead(f"the engine speaks another language: {error}"))
            return False
        if (
            not isinstance(message, EngineDeadMessage)
            or self._pipe is None
            or message.version_mismatch
        ):
            self._deliver(message)  # else the link will tell, and what comes of it
        return True

    def _handle_unavailable(self, word: EngineUnavailable) -> None:
        """Take in what the engine has said still, and hang up."""
        while self._read_one():
            pass
        self._disconnect()
        self._on_unavailable(word)

    def _read_pipe(self) -> None:
        """A word came over the link, or its end."""
        assert self._pipe is not None
        word = self._pipe.receive()
        while word is not None:
            if isinstance(word, EngineTerminated):
                self._on_dead(EngineDead(word.reason))
            elif isinstance(word, EngineUnavailable):
                self._handle_unavailable(word)
            elif isinstance(word, EngineRestored):
                self._address = engine_address(word.folder)
                self._connect()
                self._on_restored()
            elif self._on_control_message is not None:
                self._on_control_message(word)
            if not self._pipe.has_message:
                return
            word = self._pipe.receive()
        self._loop.remove_reader(self._pipe.fileno())
        self._on_dead(EngineDead(self._gone_reason))
