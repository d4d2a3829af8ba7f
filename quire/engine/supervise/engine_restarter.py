"""Keeps an engine: when its process is gone, another is started, as often as is allowed.

Not here: who hears the links (quire.server.process.supervisor; the thread below for who has no
supervisor),
and what becomes of requests (quire.engine.client.engine_client). The one idea: whoever asks an
engine is told of
three things only: it is away, it is back, it is dead.
"""

from __future__ import annotations

import logging
import selectors
import threading
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
    ProcessPipe,
    RestartEngine,
    StopProcess,
)
from quire.engine.supervise.watchdog import Watchdog

log = logging.getLogger(__name__)


class RestartBudget:
    """How often something may be started anew: `most` times within a window."""

    def __init__(
        self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts = most
        self._window_s = window_s
        self._clock = clock
        self._restart_times: deque[float] = deque()

    def try_take(self) -> bool:
        """Count one, if it may be."""
        now = self._clock()
        while self._restart_times and now - self._restart_times[0] >= self._window_s:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._max_restarts:
            return False
        self._restart_times.append(now)
        return True


class EngineRestarter:
    """The engine that there is, or that is being started. Whoever made it calls stop()."""

    def __init__(
        self,
        start: Callable[[EngineChildProcess | None], EngineProcessHandle],
        restarts: RestartBudget,
        stand_by: Callable[[], EngineChildProcess] | None = None,
    ) -> None:
        """stand_by: makes a process that can be given to start(). None: nobody stands by."""
        self._start = start
        self._start_standby = stand_by
        self._standby: EngineChildProcess | None = None
        self._restart_budget = restarts
        self._start_began_at = time.monotonic()
        self._last_start_s = 0.0  # the start before
        self._exit_reason: str | None = None  # what is known of the end of the one that there is
        self._retired: list[EngineProcessHandle] = []
        self.engine = start(None)
        self.folder = self.engine.folder
        """Of the first one: it stays until stop(), for those who share it."""
        self.restart_count = 0
        """How many have taken over."""
        self.model_located: ModelLocated | None = None
        self.engine_started: EngineStarted | None = None
        self.unavailable: EngineUnavailable | None = None
        """Told last, if the engine that there is takes no requests yet."""

    def handle(self, word: AnyControlMessage) -> AnyControlMessage | None:
        """Take in a word of the engine's process; what who asks it is to be told.

        Raises what kept the first one from starting.
        """
        if isinstance(word, ProcessFailed):
            if self.engine_started is None:
                raise error_from_wire(word.error)
            self._exit_reason = word.error.message
        elif isinstance(word, RestartEngine):
            self.restart(word.reason)
        elif isinstance(word, ModelLocated) and self.model_located is None:
            self.model_located = word
            return word
        elif isinstance(word, EngineStarted):
            return self._on_started(word)
        return None

    def _on_started(self, word: EngineStarted) -> AnyControlMessage:
        self._last_start_s = time.monotonic() - self._start_began_at
        if self._start_standby is not None:
            self._standby = self._start_standby()
        if self.engine_started is None:
            self.engine_started = word
            return word
        self.unavailable = None
        self.restart_count += 1
        log.warning("another engine is there after %.1f s", self._last_start_s)
        return EngineRestored(folder=self.engine.folder)

    def restart(self, reason: str) -> None:
        """End the engine at once, whatever it does; lost() is to follow."""
        self._exit_reason = reason
        self.engine.child.process.kill()

    def on_engine_exit(self) -> EngineUnavailable | EngineTerminated:
        """The engine's process is gone: start another, if that may be."""
        status = self.engine.child.process.wait()
        why = self._exit_reason or f"the engine's process ended: {describe_exit(status)}"
        if self.engine_started is None or not self._restart_budget.try_take():
            return EngineTerminated(reason=why)
        log.error("%s; another is being started", why)
        aboard = self.engine.child.running_ids() if self.unavailable is None else []
        self._retire_engine()
        self._exit_reason = None
        self._start_began_at = time.monotonic()
        try:
            self.engine = self._start(self._take_standby())
        except OSError as error:
            return EngineTerminated(reason=f"{why}; and another cannot be started: {error}")
        self.unavailable = EngineUnavailable(
            reason=why, expected_restart_s=self._last_start_s, running_ids=aboard
        )
        return self.unavailable

    def _take_standby(self) -> EngineChildProcess | None:
        child, self._standby = self._standby, None
        return child if child is not None and child.process.poll() is None else None

    def _retire_engine(self) -> None:
        """Clear up after the one that is gone, but for the folder that others share."""
        if self.engine.folder == self.folder:
            self._retired.append(self.engine)
        else:
            self.engine.stop(0.0)

    def stop(self, timeout: float | None = None) -> None:
        """End it, and leave nothing behind. Harmless when called again."""
        if timeout is None:  # one that starts would not listen
            timeout = (
                ENGINE_STOP_S
                if self.engine_started is not None and self.unavailable is None
                else 0.0
            )
        for one in (self.engine, *self._retired):
            one.stop(timeout)
        if self._standby is not None:
            self._standby.stop(0.0)


class EngineRestarterThread:
    """A thread that hears an engine's link, for who has no supervisor; it tells over `link`."""

    def __init__(self, keeper: EngineRestarter, watchdog: Watchdog | None = None) -> None:
        """The engine must have been started, and its first words heard. watchdog: looks at it."""
        self._restarter = keeper
        self._watchdog = watchdog
        self.pipe, theirs = ProcessPipe.create_pair()
        self._peer_pipe = ProcessPipe(theirs)
        self._thread = threading.Thread(target=self._run, name="quire-keeper", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> str:
        """Where the engine's socket is, or will be."""
        return self._restarter.engine.folder

    def stop(self) -> None:
        """End the engine."""
        self.pipe.send(StopProcess())
        self._thread.join()
        self._restarter.stop()
        if self._watchdog is not None:
            self._watchdog.close()
        self.pipe.close()

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        finally:
            self._peer_pipe.close()

    def _run_once(self) -> bool:
        """Wait for words and hear them. False: it is over."""
        pipe = self._restarter.engine.child.pipe
        with selectors.DefaultSelector() as both:
            both.register(self._peer_pipe.fileno(), selectors.EVENT_READ, self._handle_peer)
            both.register(pipe.fileno(), selectors.EVENT_READ, self._handle_engine)
            dog = self._watchdog
            heard = [
                key.data() for key, _ in both.select(None if dog is None else dog.check_interval_s)
            ]
        if dog is not None and all(heard):
            why = dog.check(self._restarter.engine.child)
            if why is not None:
                self._restarter.restart(why)
        return all(heard)

    def _handle_peer(self) -> bool:
        word = self._peer_pipe.receive()
        if isinstance(word, RestartEngine):
            self._restarter.restart(word.reason)
        return isinstance(word, RestartEngine)

    def _record_death(self) -> None:
        child, built = self._restarter.engine.child, self._restarter.engine_started
        if self._watchdog is not None and built is not None:
            self._watchdog.record_death(child, describe_exit(child.process.wait()), built.config)

    def _handle_engine(self) -> bool:
        pipe = self._restarter.engine.child.pipe
        word = pipe.receive()
        if word is None:
            self._record_death()
        told = self._restarter.on_engine_exit() if word is None else self._restarter.handle(word)
        if told is not None:
            self._peer_pipe.send(told)
        if word is not None and pipe.has_message:
            return self._handle_engine()
        return not isinstance(told, EngineTerminated)
