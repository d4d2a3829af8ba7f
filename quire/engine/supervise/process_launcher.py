"""Starts an engine's process, and ends it so that nothing is left behind.

Light: imports no torch, so that the process may be started before anything else is imported and
both get ready side by side.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import IO

from quire.config.options import Options
from quire.engine import heartbeat_page
from quire.engine.core.running_list_shm import create_running_list, read_running_list
from quire.engine.messages import error_from_wire
from quire.engine.supervise.process_pipe import (
    STOP_GRACE_S,
    AnyControlMessage,
    ChildProcess,
    EngineStarted,
    ModelLocated,
    ProcessFailed,
    RunEngine,
)
from quire.errors import ConfigError, EngineDead

ENGINE_STOP_S = 10.0
"""Time for an engine to end its step and let go of its device."""
MAX_SOCKET_FOLDER_CHARS = 80
"""Characters of a folder in which a socket can be."""


class EngineProcessHandle:
    """An engine's process and the folder of its socket. Whoever made it calls stop()."""

    def __init__(
        self,
        options: Options,
        *,
        log_level: str,
        log_style: str = "text",
        server: bool = False,
        askers: int | None = None,
        child: EngineChildProcess | None = None,
    ) -> None:
        """askers: how many processes will connect, once each; None: any number, at any time.

        child: a process that stands by for orders. None: one is started now.
        """
        self.child = child or EngineChildProcess()
        self.folder = _private_folder()
        orders = RunEngine(
            options=dict(options.non_default()),
            folder=self.folder,
            log_level=log_level,
            log_style=log_style,
            server=server,
            expected_clients=askers,
            running_list_fd=self.child.running_list_file.fileno(),
            heartbeat_fd=self.child.heartbeat_file.fileno(),
            stacks_fd=self.child.stacks_file.fileno(),
            recorder_fd=self.child.recorder_file.fileno(),
        )
        try:
            self.child.pipe.send(orders)
        except TypeError as error:
            self.stop()
            raise ConfigError(
                f"an option cannot be sent to the engine's process: {error}"
            ) from None

    def wait_model_located(self) -> ModelLocated:
        """Wait until the model is found. Raises what went wrong there: ConfigError, NoRoom ..."""
        word = self._receive()
        assert isinstance(word, ModelLocated), word
        return word

    def wait_started(self) -> EngineStarted:
        """Wait until it takes requests. Raises what went wrong there."""
        word = self._receive()
        assert isinstance(word, EngineStarted), word
        return word

    def _receive(self) -> AnyControlMessage:
        word = self.child.pipe.receive()
        if isinstance(word, ProcessFailed):
            raise error_from_wire(word.error)
        if word is None:
            status = self.child.process.wait()
            raise EngineDead(
                f"the engine's process ended while it started: {describe_exit(status)}"
            )
        return word

    def stop(self, timeout: float = ENGINE_STOP_S) -> int:
        """End it; its exit status. Harmless when called again."""
        status = self.child.stop(timeout)
        shutil.rmtree(self.folder, ignore_errors=True)
        return status


class EngineChildProcess(ChildProcess):
    """A process that imports what an engine needs, and waits for orders.

    What its death must not take with it is written to files that we have too.
    """

    def __init__(self, beat: int | None = None) -> None:
        """beat: the page of an engine before, for those who read it already."""
        self.running_list_file = create_running_list()
        self.heartbeat_file = _open_file(
            heartbeat_page.create_page() if beat is None else os.dup(beat)
        )
        self.stacks_file = _open_file(os.memfd_create("quire-stacks"))
        self.recorder_file = _open_file(os.memfd_create("quire-ring"))
        files = [self.running_list_file, self.heartbeat_file, self.stacks_file, self.recorder_file]
        super().__init__("quire.engine.core.process", sockets=files)

    def running_ids(self) -> list[str] | None:
        """Whom it ran last. None: it may be any."""
        return read_running_list(self.running_list_file)

    def stop(self, timeout: float = STOP_GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        status = super().stop(timeout)
        for file in (
            self.running_list_file,
            self.heartbeat_file,
            self.stacks_file,
            self.recorder_file,
        ):
            file.close()
        return status


def _open_file(descriptor: int) -> IO[bytes]:
    return open(descriptor, "r+b", buffering=0)


def _private_folder() -> str:
    """0700: nobody else may speak to the engine. Short: a unix socket's path has its limit."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="quire-", dir=usual if len(usual) <= MAX_SOCKET_FOLDER_CHARS else "/tmp"
    )


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
