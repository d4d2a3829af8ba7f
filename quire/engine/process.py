"""The engine in a process of its own: one thread, which reads what was asked, makes a step, and
tells. Started by quire.engine.spawn; ends when it is told to, or when its starter is gone.

While there are steps to make the socket is only looked at between them; while there are none the
thread sleeps in it, and wakes once a second to say that it lives. Nothing else in this process runs
Python, so no step waits for the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from quire.config.config import EngineConfig
from quire.config.environment import start_process
from quire.config.options import Options
from quire.engine import collector, pulse, wire
from quire.engine.aboard import Writer
from quire.engine.build import Bare, build_bare
from quire.engine.link import Built, Failed, Found, Left, Link, RunEngine, Stop, inherit
from quire.engine.messages import Answer, Call, Dead, Fault, Hello, News, fault_of
from quire.engine.pulse import Pulse
from quire.engine.recorder import Recorder, Ring
from quire.engine.remains import STACKS
from quire.engine.remote import address
from quire.engine.service import Service
from quire.engine.thread import BEAT_S
from quire.engine.witness import Witness
from quire.errors import QuireError, RequestError

log = logging.getLogger(__name__)

LAST_WORDS_MS = 1000
"""How long the last messages may take to leave."""
COLLECT_S = 300.0
"""Garbage is collected when there is nothing to do, but at least this often."""
UNBOUNDED = frozenset(("start_profile", "stop_profile"))
"""Calls that may take any time."""


def main(fd: int) -> int:
    """Run one engine, as told over the link; the exit status."""
    inherited = inherit(fd, RunEngine, "quire-engine")
    if inherited is None:
        return 1
    link, orders = inherited
    if orders.stacks is not None:
        faulthandler.enable(orders.stacks)
        faulthandler.register(STACKS, orders.stacks)
    beat = Pulse(pulse.page() if orders.pulse is None else orders.pulse)
    beat.begin(os.getpid())
    start_process(level=orders.log_level, style=orders.log_style)  # type: ignore[arg-type]
    starter = Starter(link, orders.folder)

    def found(config: EngineConfig, tokenizer: Path | None) -> None:
        link.send(Found(config=config, tokenizer=None if tokenizer is None else str(tokenizer)))

    try:
        bare = build_bare(Options.of(orders.options), found, server=orders.server)
    except QuireError as error:
        link.send(Failed(fault=fault_of(error)))
        return 1
    service = Service(bare.engine, bare.checks)
    if orders.aboard is not None:
        bare.engine.call_when_boarding(Writer(orders.aboard).write)
    server = EngineServer(
        service,
        orders.folder,
        starter,
        askers=orders.askers,
        beat=beat,
        canary_s=bare.config.health.canary_s,
        witnesses=_recorders(orders, bare),
    )
    collector.hold_back()
    server.begin()
    link.send(Built(config=bare.config, seconds=bare.seconds))
    status = server.run()
    if server.why is not None:
        link.send(Failed(fault=Fault("EngineDead", server.why)))
        logging.shutdown()
        os._exit(status)  # what the interpreter would do now may hang over a broken device
    return status


def _recorders(orders: RunEngine, bare: Bare) -> Iterator[Witness]:
    """What writes down what the engine does, if anything is to."""
    said, engine = bare.config.health, bare.engine
    if said.recorder and orders.ring is not None:
        ring = Ring(orders.ring, said.recorder_bytes)
        yield Recorder(ring, lambda: engine.available, prompts=said.recorder_prompts)


class Starter:
    """Watches who started us, in a thread that sleeps: a start and a step may take long.

    Told something, the socket `wake` becomes readable. Without a starter this process ends at once,
    and takes its folder along.
    """

    def __init__(self, link: Link, folder: str) -> None:
        self.wake, self._bell = socket.socketpair()
        self.wake.setblocking(False)
        self.stopping = False
        self.left: deque[str] = deque()
        """Who asked here and is gone, by name."""
        self._link = link
        self._folder = folder
        threading.Thread(target=self._watch, name="quire-starter", daemon=True).start()

    def hush(self) -> None:
        """Make `wake` readable no more."""
        with suppress(BlockingIOError):
            self.wake.recv(1 << 16)

    def _watch(self) -> None:
        while (word := self._link.receive()) is not None:
            if isinstance(word, Stop):
                self.stopping = True
                self._bell.send(b"!")
            elif isinstance(word, Left):
                self.left.append(word.name)
                self._bell.send(b"!")
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)


class Bell:
    """Wakes the thread that sleeps in its sockets. Rung by any thread."""

    def __init__(self) -> None:
        self.rung, self._rope = socket.socketpair()
        self.rung.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        """Make `rung` readable."""
        with suppress(BlockingIOError):  # it has been rung often enough
            self._rope.send(b"!")

    def hush(self) -> None:
        """Make it so no more."""
        with suppress(BlockingIOError):
            self.rung.recv(1 << 16)


class EngineServer:
    """A Service at a ZeroMQ ROUTER socket."""

    def __init__(
        self,
        service: Service,
        folder: str,
        starter: Starter,
        *,
        askers: int | None = None,
        beat: Pulse | None = None,
        canary_s: float = 0.0,
        witnesses: Iterable[Witness] = (),
    ) -> None:
        """canary_s: idle seconds before a canary, and between two. 0: there is none."""
        self._pulse = beat or Pulse(pulse.page())
        self._canary_s = canary_s
        self._canary_due = 0.0
        self._service = service
        self._folder = folder
        self._starter = starter
        self._askers = askers
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # a full queue would drop what a client waits for
        self._socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.LONGEST)
        self._socket.bind(address(folder))
        self._bell = Bell()
        service.engine.call_when_decided(self._bell.ring)
        service.engine.show(self._pulse, *witnesses)
        self._beat_due = 0.0
        self.why: str | None = None
        """What it died of."""
        self._busy = True  # since the last time there was nothing to do
        self._collect_due = time.monotonic() + COLLECT_S

    def begin(self) -> None:
        """Take requests from now on. Raises what is wrong with the device."""
        if self._canary_s:
            self._send_canary()
        self._pulse.serve()

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        status = 0
        try:
            while not self._starter.stopping:
                self.turn()
            self._pulse.end()
            self._service.engine.shutdown()
        except Exception as error:
            log.exception("the engine died")
            self._pulse.end()
            self.why = f"the engine died: {type(error).__name__}: {error}"
            self._tell_all(Dead(self.why))
            status = 1
        self._socket.close()
        self._context.term()
        return status

    def turn(self) -> None:
        """Read, make a step if there is one to make, tell."""
        self._wait()
        self._read_inbox()
        while self._starter.left:
            self._service.forget(self._starter.left.popleft().encode())
        service = self._service
        self._pulse.turn(working=not service.idle, requests=service.requests)
        for sender, news in service.turn():
            self._send(sender, news)
        self._beat()

    def _wait(self) -> None:
        """Sleep if there is nothing to do, until there is or a sign of life is due."""
        if not self._service.idle:
            self._busy = True
            return
        self._pulse.rest(self._service.asleep)
        now = time.monotonic()
        if self._busy:
            self._canary_due = now + self._canary_s
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._starter.wake, zmq.POLLIN)
        poller.register(self._bell.rung, zmq.POLLIN)
        left = max(self._beat_due - now, 0.0)
        if not poller.poll(int(left * 1000) + 1):
            self._idle()
        self._bell.hush()
        self._starter.hush()

    def _idle(self) -> None:
        """Nothing came while it slept."""
        if self._busy:
            self._busy = False
            self._collect()
            self._service.engine.prepare()
        elif self._canary_s and time.monotonic() >= self._canary_due and self._service.empty:
            self._send_canary()

    def _send_canary(self) -> None:
        """Compute a token that nobody asked for. Raises what that raised: the engine is dead."""
        self._pulse.canary(True)
        try:
            if not self._service.engine.canary():
                log.debug("no canary was sent: there is no room for one")
        finally:
            self._pulse.canary(False)
        self._canary_due = time.monotonic() + self._canary_s

    def _read_inbox(self) -> None:
        """Obey what was said since the step before."""
        while True:
            try:
                sender, *data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(sender, data[-1] if data else b"")

    def _obey(self, sender: bytes, data: bytes) -> None:
        try:
            message = wire.to_engine(data)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("cannot read what %.60r says: %s", sender, error)
            number = wire.number_in(data)
            if number is not None:
                fault = fault_of(RequestError(f"the engine cannot read the request: {error}"))
                self._send(sender, News([], [Answer(number, fault=fault)]))
            return
        unbounded = isinstance(message, Call) and message.name in UNBOUNDED
        if unbounded:
            self._pulse.excuse(True)
        answer = self._service.obey(sender, message)
        if unbounded:
            self._pulse.excuse(False)
        if answer is not None:
            self._send(sender, answer)
        if isinstance(message, Hello):
            self._close_door()

    def _close_door(self) -> None:
        """When all are in that will come, nobody else can, and no end can leave the socket behind.

        The folder goes too if nobody else keeps anything in it.
        """
        if self._askers is not None and len(self._service.senders()) >= self._askers:
            (Path(self._folder) / "engine").unlink(missing_ok=True)
            if self._askers == 1:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, sender: bytes, message: News | object) -> None:
        self._socket.send_multipart((sender, wire.encode(message)))  # type: ignore[arg-type]

    def _tell_all(self, message: object) -> None:
        for sender in self._service.senders():
            self._send(sender, message)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due:
            self._beat_due = now + BEAT_S
            self._tell_all(self._service.beat())
            if now >= self._collect_due:
                self._collect()  # it never was idle

    def _collect(self) -> None:
        collector.collect()
        self._collect_due = time.monotonic() + COLLECT_S
