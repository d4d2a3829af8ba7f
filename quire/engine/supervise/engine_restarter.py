"""Engine restarter: starts another engine when the process of one is gone, within a budget.

quire.engine.supervise.engine_group has one for each engine. quire.engine.client.engine_client
resumes the requests. Clients get three messages: EngineUnavailable, EngineRestored,
EngineTerminated.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from quire.engine.messages import error_from_wire
from quire.engine.supervise.process_launcher import (
    ENGINE_STOP_S,
    EngineChildProcess,
    EngineProcessHandle,
    describe_exit,
)
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    EngineRestored,
    EngineStarted,
    EngineTerminated,
    EngineUnavailable,
    ModelLocated,
    ProcessFailed,
    RestartEngine,
)

log = logging.getLogger(__name__)


class RestartBudget:
    """Allows `most` restarts within a window."""

    def __init__(
        self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts = most
        self._window_s = window_s
        self._clock = clock
        self._restart_times: deque[float] = deque()

    def try_take(self) -> bool:
        """Count a restart. Returns False if it is one too many."""
        now = self._clock()
        while self._restart_times and now - self._restart_times[0] >= self._window_s:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._max_restarts:
            return False
        self._restart_times.append(now)
        return True


class EngineRestarter:
    """The current engine, or the one that is being started. The caller must call stop()."""

    def __init__(
        self,
        start: Callable[[EngineChildProcess | None], EngineProcessHandle],
        restarts: RestartBudget,
        stand_by: Callable[[], EngineChildProcess] | None = None,
    ) -> None:
        """stand_by: starts a standby process for start(). None: there is none."""
        self._start = start
        self._start_standby = stand_by
        self._standby: EngineChildProcess | None = None
        self._restart_budget = restarts
        self._start_began_at = time.monotonic()
        self._last_start_s = 0.0  # duration of the last start
        self._exit_reason: str | None = None  # of the current engine, if known
        self._retired: list[EngineProcessHandle] = []
        self.engine = start(None)
        self.folder = self.engine.folder
        """The folder of the first engine: it is shared, and kept until stop()."""
        self.restart_count = 0
        """How many engines have replaced the first."""
        self.model_located: ModelLocated | None = None
        self.engine_started: EngineStarted | None = None
        self.address = ""
        """Where the engine listens that has started last."""
        self.unavailable: EngineUnavailable | None = None
        """The message that clients got last, while the current engine is not ready."""

    def handle(self, message: AnyControlMessage) -> AnyControlMessage | None:
        """Handle a message of the engine's process. Returns the message for its clients.

        Raises the error of the first engine's start.
        """
        if isinstance(message, ProcessFailed):
            if self.engine_started is None:
                raise error_from_wire(message.error)
            self._exit_reason = message.error.message
        elif isinstance(message, RestartEngine):
            self.restart(message.reason)
        elif isinstance(message, ModelLocated) and self.model_located is None:
            self.model_located = message
            return message
        elif isinstance(message, EngineStarted):
            return self._on_started(message)
        return None

    def _on_started(self, message: EngineStarted) -> AnyControlMessage:
        self._last_start_s = time.monotonic() - self._start_began_at
        (self.address,) = message.addresses
        if self._start_standby is not None:
            self._standby = self._start_standby()
        if self.engine_started is None:
            self.engine_started = message
            return message
        self.unavailable = None
        self.restart_count += 1
        log.warning("the new engine is ready after %.1f s", self._last_start_s)
        return EngineRestored(address=self.address)

    def restart(self, reason: str) -> None:
        """Kill the engine. on_engine_exit() must follow."""
        self._exit_reason = reason
        self.engine.child.process.kill()

    def on_engine_exit(self) -> EngineUnavailable | EngineTerminated:
        """The engine's process is gone: start another, within the budget."""
        status = self.engine.child.process.wait()
        why = self._exit_reason or f"the engine's process ended: {describe_exit(status)}"
        if self.engine_started is None or not self._restart_budget.try_take():
            return EngineTerminated(reason=why)
        log.error("%s; starting another engine", why)
        running = self.engine.child.running_ids() if self.unavailable is None else []
        self._retire_engine()
        self._exit_reason = None
        self._start_began_at = time.monotonic()
        try:
            self.engine = self._start(self._take_standby())
        except OSError as error:
            return EngineTerminated(reason=f"{why}; another cannot be started: {error}")
        self.unavailable = EngineUnavailable(
            reason=why, expected_restart_s=self._last_start_s, running_ids=running
        )
        return self.unavailable

    def _take_standby(self) -> EngineChildProcess | None:
        child, self._standby = self._standby, None
        return child if child is not None and child.process.poll() is None else None

    def _retire_engine(self) -> None:
        """Clean up after the engine that is gone, but keep the shared folder."""
        if self.engine.folder == self.folder:
            self._retired.append(self.engine)
        else:
            self.engine.stop(0.0)

    def stop(self, timeout: float | None = None) -> None:
        """Stop all processes and remove their files. Harmless when called again."""
        if timeout is None:  # an engine that starts reads no messages
            timeout = (
                ENGINE_STOP_S
                if self.engine_started is not None and self.unavailable is None
                else 0.0
            )
        for one in (self.engine, *self._retired):
            one.stop(timeout)
        if self._standby is not None:
            self._standby.stop(0.0)
