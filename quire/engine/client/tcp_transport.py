"""TCP transport: carries messages between an EngineClient and an engine on another machine.

Connections are encrypted with the cluster's secret. What is in flight on a connection that breaks
is lost, so a broken connection counts as a lost engine: streams continue from what was delivered,
and the engine aborts what it had when the client sends Hello again. Times in requests and updates
are of the monotonic clocks of two machines, and converted here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.core.sequence_timing import SequenceTiming
from quire.core.types import Update
from quire.distributed.cluster_secret import ClusterSecret
from quire.engine.client.zmq_transport import EngineEvents, ZmqTransport, configure_tcp
from quire.engine.messages import (
    AddRequests,
    EngineReady,
    MessageFromEngine,
    MessageToEngine,
    OutputBatch,
)
from quire.engine.supervise.process_pipe import (
    EngineRestored,
    EngineTerminated,
    EngineUnavailable,
)
from quire.errors import EngineDead

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 5.0
"""An engine that has not answered a Hello after so long is lost."""
REPORT_WAIT_S = 1.0
"""After a connection broke, the supervisor has so long to report the death of the engine, and what
it ran. Without a report the connection alone was lost."""
RETRY_S = 1.0
"""Between two attempts to connect."""


class TcpTransport(ZmqTransport):
    """The transport to an engine on another machine, whose death its node reports to the head."""

    def __init__(
        self,
        address: str,
        name: str,
        events: EngineEvents,
        engine: int,
        secret: ClusterSecret | None,
    ) -> None:
        """secret: None for addresses of this machine alone."""
        super().__init__(address, name, events, engine)
        self._secret = secret
        self._monitor: zmq.Socket[bytes] | None = None
        self._unsent: list[MessageToEngine] | None = []  # until the engine has answered
        self._hello_at = 0.0
        self._clock_offset_s = 0.0  # of the engine's clock from ours
        self._timer: asyncio.TimerHandle | None = None
        self._is_away = False  # the client knows that the engine is lost
        self._deliver_converted: Callable[[MessageFromEngine], None]

    def start(
        self,
        deliver: Callable[[MessageFromEngine], None],
        die: Callable[[EngineDead], None],
        away: Callable[[EngineUnavailable], None],
        back: Callable[[], None],
    ) -> None:
        """As ZmqTransport.start()."""
        self._deliver_converted = deliver
        super().start(self._convert_and_deliver, die, away, back)

    def send(self, message: MessageToEngine) -> None:
        """Send a message, once the engine has answered. Raises RequestError if it cannot be
        encoded.
        """
        if self._unsent is not None:
            self._unsent.append(message)
            return
        if isinstance(message, AddRequests) and self._clock_offset_s:
            message = msgspec.structs.replace(
                message, requests=[self._with_their_times(one) for one in message.requests]
            )
        super().send(message)

    def handle_event(self, event: EngineUnavailable | EngineRestored | EngineTerminated) -> None:
        """The engine is gone, for good or not, or another is ready."""
        self._cancel_timer()
        if isinstance(event, EngineRestored):
            if self._socket is not None or not self._is_away:
                self._lose(EngineUnavailable(reason="it was replaced", expected_restart_s=0.0))
            self.address = event.address
            self._connect()
            return
        if isinstance(event, EngineUnavailable):
            self._is_away = True
        super().handle_event(event)

    def close(self) -> None:
        """As ZmqTransport.close()."""
        self._cancel_timer()
        super().close()

    # -- the connection -------------------------------------------------------------------------

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        configure_tcp(socket, self.address)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # with Hello only: see the module's docstring
        if self._secret is not None:
            self._secret.secure_client(socket)
        broken = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = socket.get_monitor_socket(broken | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._loop.add_reader(self._monitor.FD, self._read_monitor)
        self._loop.call_soon(self._read_monitor)  # the descriptor is readable after a read only

    def _connect(self) -> None:
        self._unsent = None
        super()._connect()  # sends Hello
        self._unsent = []
        self._hello_at = time.monotonic()
        self._timer = self._loop.call_later(ANSWER_LIMIT_S, self._on_broken, "it does not answer")

    def _disconnect(self) -> None:
        if self._monitor is not None and self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._monitor.FD)
            self._socket.disable_monitor()
            self._monitor = None
        self._unsent = []
        super()._disconnect()

    def _read_monitor(self) -> None:
        if self._monitor is None:
            return
        while self._monitor is not None and self._monitor.poll(0):
            event: dict[str, Any] = recv_monitor_message(self._monitor)  # type: ignore[assignment]
            if event["event"] != zmq.EVENT_MONITOR_STOPPED:
                self._on_broken("the connection was lost")

    def _on_broken(self, reason: str) -> None:
        """Deliver what has come, and connect again, unless the death of the engine is reported."""
        self._cancel_timer()
        if self._socket is None:
            return
        while self._read_one():
            pass
        self._disconnect()
        reason = f"the engine at {self.address}: {reason}"
        wait = RETRY_S if self._is_away else REPORT_WAIT_S
        self._timer = self._loop.call_later(wait, self._retry, reason)

    def _retry(self, reason: str) -> None:
        if not self._is_away:
            log.error("%s", reason)
            self._lose(EngineUnavailable(reason=reason, expected_restart_s=RETRY_S, running_ids=[]))
        self._connect()

    def _lose(self, loss: EngineUnavailable) -> None:
        """Report the engine as lost; its requests continue elsewhere, or wait for it."""
        self._disconnect()
        self._is_away = True
        self._on_unavailable(loss)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_ready(self, ready: EngineReady) -> None:
        self._cancel_timer()
        now = time.monotonic()
        self._clock_offset_s = ready.clock - (self._hello_at + now) / 2
        if abs(self._clock_offset_s) < now - self._hello_at:
            self._clock_offset_s = 0.0  # it may be the same clock
        unsent, self._unsent = self._unsent or [], None
        for message in unsent:
            self.send(message)
        if self._is_away:
            self._is_away = False
            self._on_restored()

    # -- clocks ---------------------------------------------------------------------------------

    def _with_their_times(self, one: Any) -> Any:
        offset, deadline = self._clock_offset_s, one.deadline_at
        return msgspec.structs.replace(
            one,
            arrived_at=one.arrived_at + offset if one.arrived_at else 0.0,
            deadline_at=None if deadline is None else deadline + offset,
        )

    def _convert_and_deliver(self, message: MessageFromEngine) -> None:
        if isinstance(message, EngineReady):
            self._on_ready(message)
        elif isinstance(message, OutputBatch) and self._clock_offset_s:
            updates = [self._with_our_times(one) for one in message.updates]
            message = msgspec.structs.replace(message, updates=updates)
        self._deliver_converted(message)

    def _with_our_times(self, update: Update) -> Update:
        timing = update.timing
        if timing is None:
            return update
        return update._replace(timing=shifted(timing, -self._clock_offset_s))


def shifted(timing: SequenceTiming, seconds: float) -> SequenceTiming:
    """Return a timing with its moments so much later."""
    first, before = timing.first_token_at, timing.step_before
    return timing._replace(
        accepted_at=timing.accepted_at + seconds,
        ended_at=timing.ended_at + seconds,
        first_token_at=None if first is None else first + seconds,
        step_before=None if before is None else (before[0] + seconds, before[1] + seconds),
    )
