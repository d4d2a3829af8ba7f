"""The engine in a thread of this process: what tests and embedded use take.

Messages go in through one queue; what a turn yields comes out in one `call_soon_threadsafe`,
whatever the number of requests. While there is nothing to do the thread sleeps in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable

from quire.engine.link import Away
from quire.engine.loop import Engine
from quire.engine.messages import FromEngine, ToEngine
from quire.engine.service import Service
from quire.errors import EngineDead, Unsupported

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""An engine gives a sign of life at least this often, unless a step takes longer."""


class _Nudge:
    """In the inbox: there may be a step to make. Says nothing."""


class EngineThread:
    """A transport: carries messages between an EngineClient and an engine beside it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._service = Service(engine)
        self._inbox: queue.SimpleQueue[ToEngine | _Nudge | None] = queue.SimpleQueue()
        engine.call_when_decided(lambda: self._inbox.put(_Nudge()))
        self._thread: threading.Thread | None = None
        self._beat_due = 0.0

    def start(
        self,
        deliver: Callable[[FromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[Away], None],
        back: Callable[[], None],
    ) -> None:
        """Begin. deliver and die are called on the running event loop; no other engine comes."""
        assert self._thread is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._deliver, self._die = deliver, die
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def restart(self, reason: str) -> None:
        """Raises Unsupported: a thread cannot be ended from outside."""
        raise Unsupported(f"an engine in a thread cannot be restarted ({reason})")

    async def stop(self) -> None:
        """End the thread after its step."""
        if self._thread is not None:
            self.close()
            await asyncio.to_thread(self._thread.join)

    def close(self) -> None:
        """Have the thread end after its step."""
        self._inbox.put(None)

    # Below: the engine's own thread.

    def _run(self) -> None:
        try:
            while self._read_inbox():
                for _, news in self._service.turn():
                    self._call_soon(self._deliver, news)
                self._beat()
            self.engine.shutdown()
        except Exception as error:
            log.exception("the engine died")
            why = f"the engine died: {type(error).__name__}: {error}"
            self._call_soon(self._die, EngineDead(why))

    def _read_inbox(self) -> bool:
        """Obey what was said since the step before, waiting if there is nothing else to do.

        False: the thread is to end.
        """
        try:
            if self._service.idle:
                message = self._inbox.get(timeout=BEAT_S)
            else:
                message = self._inbox.get_nowait()
            while message is not None:
                if not isinstance(message, _Nudge):
                    self._obey(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _obey(self, message: ToEngine) -> None:
        answer = self._service.obey(0, message)
        if answer is not None:
            self._call_soon(self._deliver, answer)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due:
            self._beat_due = now + BEAT_S
            self._call_soon(self._deliver, self._service.beat())

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
