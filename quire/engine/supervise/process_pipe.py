"""Process pipe: carries control messages between the processes of a server: start, ready, stop.

A pipe is one end of a socket pair; one other process has the other end. The end of a pipe means
that the other process is gone, kill -9 included. Messages are JSON lines.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from quire.config.engine_config import EngineConfig
from quire.engine.messages import WireError
from quire.engine.startup.plain_config import to_plain
from quire.env import child_environment
from quire.log import open_missing_streams
from quire.platform import bytecode_cache

STOP_GRACE_S = 5.0
"""Time for a process to stop before it is killed."""

Orders = TypeVar("Orders", bound="ControlMessage")


class HasFileno(Protocol):
    """A socket, a file."""

    def fileno(self) -> int: ...


class ControlMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all control messages."""


class RunEngine(ControlMessage, frozen=True):
    """To an engine process: start an engine."""

    options: dict[str, Any]  # of quire.config.options, flat: those that differ from the defaults
    folder: str  # for its socket; removed at the end
    log_level: str
    log_style: str = "text"
    server: bool = True
    expected_clients: int | None = None  # each connects once; None: any number, at any time
    listen_host: str | None = None  # for clients on other machines; None: a socket in the folder
    cluster_secret: str | None = None  # that they share
    running_list_fd: int | None = None  # of quire.engine.core.running_list_shm
    heartbeat_fd: int | None = None  # of quire.engine.heartbeat_page
    stacks_fd: int | None = None  # a file for stacks, when it hangs or dies
    recorder_fd: int | None = None  # of quire.engine.recording.flight_recorder
    nodes_fd: int | None = None  # a socket where other machines with ranks of the engine join


class ModelLocated(ControlMessage, frozen=True):
    """From an engine process: the model is found, and its weights are being read.

    config: final but for the number of blocks. tokenizer_folder: None without a tokenizer.
    """

    config: EngineConfig
    tokenizer_folder: str | None


class EngineStarted(ControlMessage, frozen=True):
    """From an engine process: it accepts requests. To API processes: all engines do."""

    config: EngineConfig
    startup_seconds: dict[str, float]  # of quire.engine.startup.startup_timer
    addresses: tuple[str, ...] = ()  # where the engines listen


class RunApiProcess(ControlMessage, frozen=True):
    """To an API process: start serving. socket_fds: file descriptors that it inherited."""

    options: dict[str, Any]  # of quire.server.options
    folder: str  # shared by API processes
    index: int
    count: int
    socket_fds: list[int]
    log_level: str
    engines: int = 1
    first_rank: int = 0  # of the first engine, among all engines of the model
    cluster_secret: str | None = None  # for engines on other nodes
    client_name: str = ""  # unique at the engine
    incarnation: int = 0  # how many processes had this index before
    engine_restarts: tuple[int, ...] = ()  # how many engines have replaced each of the first
    engine_heartbeat_fds: tuple[int, ...] = ()  # of those of this node: quire.engine.heartbeat_page
    heartbeat_fd: int | None = None  # the page of this process
    stacks_fd: int | None = None  # a file for stacks, when it hangs or dies
    blocked_inputs: tuple[tuple[bytes, float], ...] = ()  # fingerprints, and seconds left


class ServerListening(ControlMessage, frozen=True):
    """From an API process: it accepts connections. banner: printed for the operator."""

    banner: str


class ProcessFailed(ControlMessage, frozen=True):
    """From any process: it cannot start, or has failed."""

    error: WireError


class EngineUnavailable(ControlMessage, frozen=True):
    """To an API process: the engine is gone, and another is being started.

    running_ids: ids of the requests that it ran. None: any request may have run.
    """

    reason: str
    expected_restart_s: float  # the time of the last start
    running_ids: list[str] | None = None
    engine: int = 0  # of the server


class EngineRestored(ControlMessage, frozen=True):
    """To an API process: another engine accepts requests."""

    address: str
    engine: int = 0


class ClientGone(ControlMessage, frozen=True):
    """To an engine process: the client of this name is gone."""

    client_name: str


class RestartEngine(ControlMessage, frozen=True):
    """From any process: kill the engine, and start another."""

    reason: str
    engine: int = 0


class InputBlocked(ControlMessage, frozen=True):
    """From an API process, forwarded to the others: refuse inputs with this fingerprint for a
    while.
    """

    fingerprint: bytes


class EngineDraining(ControlMessage, frozen=True):
    """From an API process, forwarded to the others: an engine gets no new requests.

    move_after_s: its streams continue on other engines then; None: it gets requests again.
    """

    engine: int
    move_after_s: float | None


class JoinEngines(ControlMessage, frozen=True):
    """From a node, first: it will have the engines of some ranks of the head's model."""

    first_rank: int
    count: int
    host: str
    versions: dict[str, str]
    options: dict[str, Any]  # as in RunEngine


class JoinAnswer(ControlMessage, frozen=True):
    """To a node: it may start its engines. refusal: it may not, or no longer."""

    refusal: str | None = None


class LinkBeat(ControlMessage, frozen=True):
    """To a node, twice a second: the head lives."""


class NodeStarted(ControlMessage, frozen=True):
    """From a node: all of its engines accept requests, at these addresses."""

    config: EngineConfig
    addresses: tuple[str, ...]


class NodeLost(ControlMessage, frozen=True):
    """From a node, last: it ends."""

    reason: str


class EngineTerminated(ControlMessage, frozen=True):
    """To an API process: the engine is gone for good, or another part of the server is."""

    reason: str
    engine: int = 0


class StopProcess(ControlMessage, frozen=True):
    """To any process: stop."""


AnyControlMessage = (
    RunEngine
    | ModelLocated
    | EngineStarted
    | RunApiProcess
    | ServerListening
    | ProcessFailed
    | EngineUnavailable
    | EngineRestored
    | ClientGone
    | RestartEngine
    | InputBlocked
    | EngineDraining
    | JoinEngines
    | JoinAnswer
    | LinkBeat
    | NodeStarted
    | NodeLost
    | EngineTerminated
    | StopProcess
)


encode = msgspec.json.Encoder(enc_hook=to_plain).encode
_decoder: msgspec.json.Decoder[AnyControlMessage] = msgspec.json.Decoder(AnyControlMessage)
decode = _decoder.decode


class ProcessPipe:
    """One end of a pipe. Not thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self.peer_closed = False
        """Whether receive() has found the other end closed."""

    @classmethod
    def create_pair(cls) -> tuple[ProcessPipe, socket.socket]:
        """Returns a pipe, and the end for the other process."""
        parent_end, child_end = socket.socketpair()
        return cls(parent_end), child_end

    @classmethod
    def from_fd(cls, fd: int) -> ProcessPipe:
        """The end that this process inherited."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ControlMessage) -> None:
        """Send a message, if the other process lives. Raises TypeError if it cannot be encoded."""
        line = encode(message) + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            return  # the next receive() reports that the other process is gone

    def try_send(self, message: ControlMessage) -> bool:
        """Send a short message without waiting. Returns False if the other process has not read for
        long: the message is lost.
        """
        line = encode(message) + b"\n"
        patience = self._socket.gettimeout()
        self._socket.settimeout(0)
        try:
            self._socket.send(line)  # the kernel takes all of so short a line, or nothing
        except BlockingIOError:
            return False
        except OSError:
            return True  # as send()
        finally:
            self._socket.settimeout(patience)
        return True

    def receive(self, timeout: float | None = None) -> AnyControlMessage | None:
        """Wait for the next message. None: the other end is closed. Raises TimeoutError."""
        self._socket.settimeout(timeout)
        while b"\n" not in self._buffer:
            if not self._fill_buffer():
                self.peer_closed = True
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return decode(line)

    def _fill_buffer(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return False
        self._buffer += data
        return bool(data)

    @property
    def has_message(self) -> bool:
        """Whether receive() can return a message without reading the socket."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self._socket.close()


def ignore_signals() -> None:
    """In the main thread of a child process: its parent handles signals, and stops it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def receive_orders(fd: int, orders: type[Orders], name: str) -> tuple[ProcessPipe, Orders] | None:
    """Receive the orders of a child process. Returns its pipe and the orders; None: there are none.

    name: of this process, for `ps` and `top`.
    """
    pipe = ProcessPipe.from_fd(fd)
    message = pipe.receive()
    if not isinstance(message, orders):
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    return pipe, message


# Child processes get our sys.path, whatever their working folder.
_BOOTSTRAP = """
import importlib, json, sys
path, module, fd, *args = sys.argv[1:]
sys.path[:] = json.loads(path)
sys.exit(importlib.import_module(module).main(int(fd), *args))
"""


def spawn_process(
    module: str,
    end: socket.socket,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    sockets: Sequence[HasFileno] = (),
    fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run `main(fd of the end, *args)` of a module in a process that inherits sockets and other
    file descriptors.

    env: of the process; None: the environment of this one.
    """
    variables = child_environment() if env is None else env
    path = msgspec.json.encode(sys.path).decode()
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, path, module, str(end.fileno()), *args],
        pass_fds=[end.fileno(), *(one.fileno() for one in sockets), *fds],
        env={**variables, **bytecode_cache.child_variables()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal goes to this process alone
    )


class ChildProcess:
    """A child process and the pipe to it."""

    def __init__(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        sockets: Sequence[HasFileno] = (),
    ) -> None:
        """Run `main(fd of the pipe, *args)` of a module in a process that inherits sockets."""
        open_missing_streams()  # the log of the child must not go into the pipe
        self.pipe, child_end = ProcessPipe.create_pair()
        with child_end:
            self.process = spawn_process(module, child_end, args, env=env, sockets=sockets)

    def stop(self, timeout: float = STOP_GRACE_S) -> int:
        """Stop it; kill it after the timeout. Returns its exit status."""
        if self.process.poll() is None:
            self.pipe.send(StopProcess())
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = self.kill()
        self.pipe.close()
        return status

    def kill(self) -> int:
        """Kill it. Returns its exit status."""
        self.process.kill()
        return self.process.wait()
