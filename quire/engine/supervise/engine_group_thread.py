"""Engine group thread: starts and replaces engines, for programs without a supervisor process."""

from __future__ import annotations

import logging
import selectors
import threading
import time

from quire.config.options import Options
from quire.engine.messages import error_from_wire, error_to_wire
from quire.engine.supervise.engine_group import EngineGroup
from quire.engine.supervise.process_pipe import (
    AnyControlMessage,
    ChildProcess,
    EngineStarted,
    EngineTerminated,
    ModelLocated,
    ProcessFailed,
    ProcessPipe,
    RestartEngine,
    StopProcess,
)
from quire.env import read
from quire.errors import EngineDead, QuireError

log = logging.getLogger(__name__)


class EngineGroupThread:
    """A thread that handles the messages of a group's engines.

    It sends those for clients to `pipe`. The caller must call stop().
    """

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self.pipe, theirs = ProcessPipe.create_pair()
        self._peer_pipe = ProcessPipe(theirs)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._peer_pipe.fileno(), selectors.EVENT_READ, None)
        self._next_check_at = 0.0
        group.start()
        for child in group.children:
            self._register(child)
        self._thread = threading.Thread(target=self._run, name="quire-engines", daemon=True)
        self._thread.start()

    @classmethod
    def for_options(cls, options: Options, *, log_level: str) -> EngineGroupThread:
        """Start the engines that the options describe. Raises ConfigError."""
        return cls(EngineGroup(options, read().cache_dir, log_level=log_level, server=False))

    def wait_model_located(self) -> ModelLocated:
        """Wait until the model is found. Raises the error of the start: ConfigError, NoRoom ..."""
        message = self._receive()
        assert isinstance(message, ModelLocated), message
        return message

    def wait_started(self) -> EngineStarted:
        """Wait until all engines accept requests. Raises the error of the start."""
        message = self._receive()
        assert isinstance(message, EngineStarted), message
        return message

    def _receive(self) -> AnyControlMessage:
        message = self.pipe.receive()
        if isinstance(message, ProcessFailed):
            raise error_from_wire(message.error)
        if message is None or isinstance(message, EngineTerminated):
            why = "it was stopped" if message is None else message.reason
            raise EngineDead(f"an engine did not start: {why}")
        return message

    @property
    def addresses(self) -> list[str]:
        """Where the engines listen."""
        return self._group.addresses

    def stop(self) -> None:
        """Stop the engines."""
        self.pipe.send(StopProcess())
        self._thread.join()
        self._group.stop()
        self.pipe.close()

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except QuireError as error:  # an engine cannot start
            self._peer_pipe.send(ProcessFailed(error=error_to_wire(error)))
        finally:
            self._peer_pipe.close()
            self._selector.close()

    def _register(self, child: ChildProcess) -> None:
        self._selector.register(child.pipe.fileno(), selectors.EVENT_READ, child)

    def _run_once(self) -> bool:
        """Wait for messages and handle them. Returns False to stop."""
        interval = self._group.check_interval_s
        for key, _ in self._selector.select(interval):
            if not (self._handle_peer() if key.data is None else self._handle_engine(key.data)):
                return False
        if interval is not None and time.monotonic() >= self._next_check_at:
            self._next_check_at = time.monotonic() + interval
            for engine, why in self._group.check_liveness():
                self._group.restart(engine, why)
        return True

    def _handle_peer(self) -> bool:
        message = self._peer_pipe.receive()
        if isinstance(message, RestartEngine):
            self._group.restart(message.engine, message.reason)
        return isinstance(message, RestartEngine)

    def _handle_engine(self, child: ChildProcess) -> bool:
        message = child.pipe.receive()
        if message is None:
            return self._handle_exit(child)
        answer = self._group.handle(child, message)
        if answer is not None:
            self._peer_pipe.send(answer)
        return not child.pipe.has_message or self._handle_engine(child)

    def _handle_exit(self, child: ChildProcess) -> bool:
        self._selector.unregister(child.pipe.fileno())
        answer, successor = self._group.on_exit(child)
        self._peer_pipe.send(answer)
        if successor is not None:
            self._register(successor)
        return not self._group.is_lost
