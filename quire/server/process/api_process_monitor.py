"""Monitors an API process from the supervisor: whether its event loop still turns.

The loop writes heartbeats to a page of its own, as the engine does (quire.engine.heartbeat_page),
and the same watchdog reads it. A probe over HTTP would wait in a queue that may be long, and would
reach whichever process the kernel chose.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Sequence
from typing import IO

from quire.engine import heartbeat_page
from quire.engine.heartbeat_page import HeartbeatReader, HeartbeatWriter
from quire.engine.supervise import crash_artifacts
from quire.engine.supervise.liveness import PROCESS_STOPPED, LivenessMonitor
from quire.engine.supervise.process_pipe import STOP_GRACE_S, ChildProcess, HasFileno, RunApiProcess

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
STOPPED_TIMEOUT_S = 5.0
"""One that a signal has stopped for so long is ended; its connections wait for that."""


class ApiChildProcess(ChildProcess):
    """An API process. Its creator calls stop() or, when the process has ended, close()."""

    def __init__(
        self, sockets: Sequence[HasFileno], limit_s: float, start_s: float | None = None
    ) -> None:
        """limit_s: of silence, after which it is beyond hope. 0: any. start_s: what a start takes,
        if that is known.
        """
        self.heartbeat_file: IO[bytes] = open(heartbeat_page.create_page(), "r+b", buffering=0)  # noqa: SIM115 it is ours till close()
        self.stacks_file: IO[bytes] = open(os.memfd_create("quire-stacks"), "r+b", buffering=0)  # noqa: SIM115
        self._liveness = LivenessMonitor(
            HeartbeatReader(self.heartbeat_file.fileno()).read,
            limit_s,
            stopped_s=min(STOPPED_TIMEOUT_S, limit_s),
        )
        self._liveness.set_start_time(start_s)
        self._is_unresponsive = False
        self._started_at = time.monotonic()
        super().__init__(
            "quire.server.process.api_process",
            sockets=[*sockets, self.heartbeat_file, self.stacks_file],
        )

    @property
    def age_s(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started_at

    def check_liveness(self) -> str | None:
        """Why it should be ended, if it should: its stacks are in the log then. Said once."""
        why = None if self._is_unresponsive else self._liveness.check(self.process.pid)
        if why is not None:
            self._is_unresponsive = True
            crash_artifacts.log_thread_stacks(
                self, f"an API process makes no progress: {why}", asking=why != PROCESS_STOPPED
            )
        return why

    def log_crash_stacks(self) -> None:
        """Its process is gone: log the stacks that it wrote, if it died of a fault."""
        stacks_file = crash_artifacts.read_crash_stacks(self)
        if stacks_file.startswith("Fatal"):
            log.error("an API process died here:\n%s", stacks_file.rstrip())

    def stop(self, timeout: float = STOP_GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        status = super().stop(timeout)
        self.close()
        return status

    def close(self) -> None:
        """Let go of what was shared with it. Harmless when called again."""
        self.pipe.close()
        self.heartbeat_file.close()
        self.stacks_file.close()


class HeartbeatTask:
    """In the process itself: shows that it starts, and from turn() on that its loop turns."""

    def __init__(self, orders: RunApiProcess) -> None:
        """Without a page there is no watchdog."""
        self._writer = HeartbeatWriter(
            heartbeat_page.create_page() if orders.heartbeat_fd is None else orders.heartbeat_fd
        )
        self._writer.mark_starting(os.getpid())
        if orders.stacks_fd is not None:
            faulthandler.enable(orders.stacks_fd)
            faulthandler.register(crash_artifacts.STACK_DUMP_SIGNAL, orders.stacks_fd)

    def start_on_loop(self) -> None:
        """On the event loop that serves: beat from now on."""
        self._writer.mark_serving()
        self._write_heartbeat(asyncio.get_running_loop())

    def _write_heartbeat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._writer.mark_idle(0)
        loop.call_later(HEARTBEAT_INTERVAL_S, self._write_heartbeat, loop)
