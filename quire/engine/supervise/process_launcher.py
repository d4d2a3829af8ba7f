"""Process launcher: starts an engine's process, and stops it without leaving anything behind.

Imports no torch, so that the process can start before its parent has imported everything else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from quire.config.options import Options
from quire.engine import heartbeat_page
from quire.engine.core.running_list_shm import create_running_list, read_running_list
from quire.engine.supervise.process_pipe import (
    STOP_GRACE_S,
    ChildProcess,
    HasFileno,
    RunEngine,
)
from quire.env import child_environment
from quire.errors import ConfigError

ENGINE_STOP_S = 10.0
"""Time for an engine to finish its step and release its device."""
MAX_SOCKET_FOLDER_CHARS = 80
"""Characters in the path of a folder for a Unix socket: the path of a socket has a limit."""


class EngineProcessHandle:
    """An engine's process and the folder of its socket. The caller must call stop()."""

    def __init__(
        self,
        options: Options,
        *,
        log_level: str,
        log_style: str = "text",
        server: bool = False,
        clients: int | None = None,
        child: EngineChildProcess | None = None,
        listen_host: str | None = None,
        cluster_secret: str | None = None,
        nodes_fd: int | None = None,
    ) -> None:
        """clients: how many processes will connect, once each; None: any number, at any time.

        listen_host: address at which clients of other machines connect, with the cluster's secret.

        child: a standby process that waits for orders. None: a process is started now. nodes_fd: a
        socket that it inherited, where other machines with ranks of the engine join.
        """
        self.child = child or EngineChildProcess()
        self.folder = _private_folder()
        orders = RunEngine(
            options=dict(options.non_default()),
            folder=self.folder,
            log_level=log_level,
            log_style=log_style,
            server=server,
            expected_clients=clients,
            listen_host=listen_host,
            cluster_secret=cluster_secret,
            running_list_fd=self.child.running_list_file.fileno(),
            heartbeat_fd=self.child.heartbeat_file.fileno(),
            stacks_fd=self.child.stacks_file.fileno(),
            recorder_fd=self.child.recorder_file.fileno(),
            nodes_fd=nodes_fd,
        )
        try:
            self.child.pipe.send(orders)
        except TypeError as error:
            self.stop()
            raise ConfigError(
                f"an option cannot be sent to the engine's process: {error}"
            ) from None

    def stop(self, timeout: float = ENGINE_STOP_S) -> int:
        """Stop the process. Returns its exit status. Harmless when called again."""
        status = self.child.stop(timeout)
        shutil.rmtree(self.folder, ignore_errors=True)
        return status


class EngineChildProcess(ChildProcess):
    """A process that imports what an engine needs, and waits for orders.

    Running list, heartbeat, stacks and recording are in files that this process shares.
    """

    def __init__(
        self,
        beat: int | None = None,
        variables: Mapping[str, str] | None = None,
        inherited: Sequence[HasFileno] = (),
        ranks: int = 0,
    ) -> None:
        """beat: the heartbeat page of earlier engines, which has its readers.

        variables: of its environment, beside those of this process. inherited: further files.
        ranks: processes that import what a rank needs, before there are orders.
        """
        self.running_list_file = create_running_list()
        self.heartbeat_file = _open_file(
            heartbeat_page.create_page() if beat is None else os.dup(beat)
        )
        self.stacks_file = _open_file(os.memfd_create("quire-stacks"))
        self.recorder_file = _open_file(os.memfd_create("quire-ring"))
        files = [self.running_list_file, self.heartbeat_file, self.stacks_file, self.recorder_file]
        environment = child_environment(**(variables or {}))
        super().__init__(
            "quire.engine.core.process_main",
            [str(ranks)],
            env=environment,
            sockets=[*files, *inherited],
        )

    def running_ids(self) -> list[str] | None:
        """Ids of the requests that it ran last. None: any request may have run."""
        return read_running_list(self.running_list_file)

    def stop(self, timeout: float = STOP_GRACE_S) -> int:
        """Stop it; kill it after the timeout. Returns its exit status."""
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
    """Make a folder with mode 0700 and a short path: no other user may connect to the engine."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="quire-", dir=usual if len(usual) <= MAX_SOCKET_FOLDER_CHARS else "/tmp"
    )


def describe_exit(status: int) -> str:
    """An exit status in words."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
