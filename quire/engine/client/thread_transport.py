"""Thread transport: runs the engine in a thread of this process, for tests and embedded use.

Messages go in through one queue. Each batch of outputs comes back in one `call_soon_threadsafe`,
whatever the number of requests. An idle thread sleeps in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine.core.engine_core import EngineCore
from quire.engine.core.engine_rpc import EngineRpc
from quire.engine.messages import HEARTBEAT_INTERVAL_S, MessageFromEngine, MessageToEngine
from quire.engine.supervise.process_pipe import EngineUnavailable
from quire.errors import EngineDead, Unsupported

if TYPE_CHECKING:
    from quire.engine.core.adapter_store import AdapterStore

log = logging.getLogger(__name__)


class _Wakeup:
    """In the inbox: there may be a step to run."""


class ThreadTransport:
    """Carries messages between an EngineClient and an engine in the same process."""

    def __init__(self, engine: EngineCore, adapters: AdapterStore | None = None) -> None:
        self.engine = engine
        self._rpc = EngineRpc(engine, adapters=adapters)
        self._inbox: queue.SimpleQueue[MessageToEngine | _Wakeup | None] = queue.SimpleQueue()
        engine.set_ready_callback(lambda: self._inbox.put(_Wakeup()))
        self._thread: threading.Thread | None = None
        self._heartbeat_due = 0.0

    def start(
        self,
        deliver: Callable[[MessageFromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[EngineUnavailable], None],
        back: Callable[[], None],
    ) -> None:
        """Start. Calls deliver and die on the running event loop, and never away or back."""
        assert self._thread is None, "start() was called twice"
        self._loop = asyncio.get_running_loop()
        self._deliver, self._on_dead = deliver, die
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def send(self, message: MessageToEngine) -> None:
        self._inbox.put(message)

    def restart(self, reason: str) -> None:
        """Raises Unsupported: a thread cannot be killed."""
        raise Unsupported(f"an engine in a thread cannot be restarted ({reason})")

    async def stop(self) -> None:
        """Stop the thread after its step."""
        if self._thread is not None:
            self.close()
            await asyncio.to_thread(self._thread.join)

    def close(self) -> None:
        """Have the thread stop after its step."""
        self._inbox.put(None)

    # -- on the engine's thread

    def _run(self) -> None:
        try:
            while self._read_inbox():
                for _, batch in self._rpc.run_step():
                    self._call_soon(self._deliver, batch)
                self._send_heartbeat()
            self.engine.shutdown()
        except Exception as error:
            log.exception("the engine died")
            why = f"the engine died: {type(error).__name__}: {error}"
            self._call_soon(self._on_dead, EngineDead(why))

    def _read_inbox(self) -> bool:
        """Handle the messages since the last step; wait for one if the engine is idle.

        Returns False if the thread should stop.
        """
        try:
            if self._rpc.idle:
                message = self._inbox.get(timeout=HEARTBEAT_INTERVAL_S)
            else:
                message = self._inbox.get_nowait()
            while message is not None:
                if not isinstance(message, _Wakeup):
                    self._handle_message(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle_message(self, message: MessageToEngine) -> None:
        answer = self._rpc.handle(0, message)
        if answer is not None:
            self._call_soon(self._deliver, answer)

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_INTERVAL_S
            self._call_soon(self._deliver, self._rpc.heartbeat())

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
