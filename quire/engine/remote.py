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

from quire.engine import wire
from quire.engine.link import Any_, Away, Back, Died, Link, Restart
from quire.engine.messages import PROTOCOL, Dead, FromEngine, Hello, ToEngine
from quire.errors import EngineDead, EngineError

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Messages that are read before others on the event loop have their turn."""


def address(folder: str | Path) -> str:
    """Where the engine of this folder listens."""
    return f"ipc://{folder}/engine"


class EngineSocket:
    """A transport: carries messages between an EngineClient and an engine's process.

    link: tells of the death of the engine (an Away word; Back when another is there; Died), and by
    its own end of that of whoever holds the other. Without one, nobody tells. on_word: is called
    with the other words that come over it.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        link: Link | None = None,
        *,
        on_word: Callable[[Any_], None] | None = None,
        gone: str = "the engine's process is gone",
    ) -> None:
        self._address = address(folder)
        self._name = name
        self._link = link
        self._on_word = on_word
        self._gone = gone
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None  # while there is an engine

    def start(
        self,
        deliver: Callable[[FromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[Away], None],
        back: Callable[[], None],
    ) -> None:
        """Begin. All four are called on the running event loop."""
        assert self._context is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._deliver, self._die, self._away, self._back = deliver, die, away, back
        self._context = zmq.Context()
        self._connect()
        if self._link is not None:
            self._loop.add_reader(self._link.fileno(), self._listen)
            if self._link.has_word:
                self._loop.call_soon(self._listen)

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
        self.send(Hello(PROTOCOL, self._name))

    def _hang_up(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.FD)
            self._socket.close()
            self._socket = None

    def restart(self, reason: str) -> None:
        """Have the engine ended, whatever it does, and another started."""
        if self._link is None:
            raise EngineError(f"nobody is there to restart the engine ({reason})")
        self._link.send(Restart(reason=reason))

    def send(self, message: ToEngine) -> None:
        """To nobody, while there is no engine. Raises RequestError for what cannot travel."""
        if self._socket is None:
            return
        self._socket.send(wire.encode(message), zmq.NOBLOCK)
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
        self._hang_up()
        if self._link is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._link.fileno())
        self._context.term()
        self._context = None

    def _read(self) -> None:
        for _ in range(AT_ONCE):
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
            message = wire.from_engine(data)
        except msgspec.DecodeError as error:
            log.error("cannot read what the engine says: %s", error)  # noqa: TRY400 no trace
            self._die(EngineDead(f"the engine speaks another language: {error}"))
            return False
        if not isinstance(message, Dead) or self._link is None or message.mixed:
            self._deliver(message)  # else the link will tell, and what comes of it
        return True

    def _lose(self, word: Away) -> None:
        """Take in what the engine has said still, and hang up."""
        while self._read_one():
            pass
        self._hang_up()
        self._away(word)

    def _listen(self) -> None:
        """A word came over the link, or its end."""
        assert self._link is not None
        word = self._link.receive()
        while word is not None:
            if isinstance(word, Died):
                self._die(EngineDead(word.why))
            elif isinstance(word, Away):
                self._lose(word)
            elif isinstance(word, Back):
                self._address = address(word.folder)
                self._connect()
                self._back()
            elif self._on_word is not None:
                self._on_word(word)
            if not self._link.has_word:
                return
            word = self._link.receive()
        self._loop.remove_reader(self._link.fileno())
        self._die(EngineDead(self._gone))
