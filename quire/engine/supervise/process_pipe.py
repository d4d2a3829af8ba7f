"""What processes of one server say to each other besides requests: start, ready, stop.

A link is one end of a socket pair whose other end only one other process has. So a link that ends
means that the process over there is gone, however it went: kill -9 included. Words are JSON lines.
"""

from __future__ import annotations

import contextlib
import os
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

STOP_GRACE_S = 5.0
"""Time to end by oneself before one is killed."""

Orders = TypeVar("Orders", bound="ControlMessage")


class HasFileno(Protocol):
    """A socket, a file."""

    def fileno(self) -> int: ...


class ControlMessage(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all."""


class RunEngine(ControlMessage, frozen=True):
    """To an engine process: its orders."""

    options: dict[str, Any]  # of quire.config.options, flat, as far as they were changed
    folder: str  # where its socket goes; removed with everything in it
    log_level: str
    log_style: str = "text"
    server: bool = True
    expected_clients: int | None = (
        None  # how many will connect, once each; None: any number, at any time
    )
    running_list_fd: int | None = (
        None  # file descriptor of a page of quire.engine.core.running_list_shm
    )
    heartbeat_fd: int | None = None  # and of one of quire.engine.heartbeat_page
    stacks_fd: int | None = None  # and of a file for stacks, when it hangs or dies
    recorder_fd: int | None = None  # and of one for quire.engine.recording.flight_recorder


class ModelLocated(ControlMessage, frozen=True):
    """From an engine process: the model is found, and its weights are being read.

    tokenizer: its folder; None if there is to be none. config: but for the number of blocks.
    """

    config: EngineConfig
    tokenizer_folder: str | None


class EngineStarted(ControlMessage, frozen=True):
    """From an engine process: it takes requests."""

    config: EngineConfig
    startup_seconds: dict[
        str, float
    ]  # what its start was spent on: quire.engine.startup.startup_timer


class RunApiProcess(ControlMessage, frozen=True):
    """To an API process: its orders. sockets: file descriptors it was started with."""

    options: dict[str, Any]  # of quire.server.options
    folder: str  # what API processes share
    index: int
    count: int
    socket_fds: list[int]
    log_level: str
    engine_folder: str = ""  # the engine's folder
    client_name: str = ""  # what the engine knows it by; no two processes have the same
    incarnation: int = 0  # how many processes had this index before
    engine_restarts: int = 0  # how many engines have taken over so far
    engine_heartbeat_fd: int | None = (
        None  # file descriptor of the engine's page: quire.engine.heartbeat_page
    )
    heartbeat_fd: int | None = None  # and of the page of this process
    stacks_fd: int | None = None  # and of a file for stacks, when it hangs or dies
    blocked_inputs: tuple[
        tuple[bytes, float], ...
    ] = ()  # fingerprints, and for how many seconds yet


class ServerListening(ControlMessage, frozen=True):
    """From an API process: it answers. welcome: what to tell people."""

    banner: str


class ProcessFailed(ControlMessage, frozen=True):
    """From any: it cannot do what it was started for."""

    error: WireError


class EngineUnavailable(ControlMessage, frozen=True):
    """To an API process: the engine is gone, and another is being started.

    aboard: ids of the requests that ran there, as far as is known. None: it may have been any.
    """

    reason: str
    expected_restart_s: float  # what a start took the last time
    running_ids: list[str] | None = None


class EngineRestored(ControlMessage, frozen=True):
    """To an API process: another engine takes requests, at a socket in this folder."""

    folder: str


class ClientGone(ControlMessage, frozen=True):
    """To an engine process: who called itself so is gone, and wants nothing any more."""

    client_name: str


class RestartEngine(ControlMessage, frozen=True):
    """From any: the engine is of no use any more. End it at once, and start another."""

    reason: str


class InputBlocked(ControlMessage, frozen=True):
    """From an API process, and on to the others: inputs with this fingerprint are not tried again
    for a while.
    """

    fingerprint: bytes


class EngineTerminated(ControlMessage, frozen=True):
    """To an API process: the engine is gone for good, or other parts of the server are."""

    reason: str


class StopProcess(ControlMessage, frozen=True):
    """To any: end well, now."""


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
    | EngineTerminated
    | StopProcess
)


def _to_plain(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} works in one process only")


_encoder = msgspec.json.Encoder(enc_hook=_to_plain)
_decoder: msgspec.json.Decoder[AnyControlMessage] = msgspec.json.Decoder(AnyControlMessage)


class ProcessPipe:
    """One end. Not for several threads at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self.peer_closed = False
        """receive() has found the other end gone."""

    @classmethod
    def create_pair(cls) -> tuple[ProcessPipe, socket.socket]:
        """A link, and the end to give away."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def from_fd(cls, fd: int) -> ProcessPipe:
        """The end that this process was started with."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, word: ControlMessage) -> None:
        """Say something; to one who is gone, nothing. Raises TypeError for what cannot travel."""
        line = _encoder.encode(word) + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            return  # whoever reads our end will be told that it is gone

    def try_send(self, word: ControlMessage) -> bool:
        """send() a short word without waiting. False: who is there has not read for long, and this
        word is lost.
        """
        line = _encoder.encode(word) + b"\n"
        patience = self._socket.gettimeout()
        self._socket.settimeout(0)
        try:
            self._socket.send(line)  # of so short a line the kernel takes all, or nothing
        except BlockingIOError:
            return False
        except OSError:
            return True  # as send()
        finally:
            self._socket.settimeout(patience)
        return True

    def receive(self, timeout: float | None = None) -> AnyControlMessage | None:
        """The next word, waited for. None: the other end is gone. Raises TimeoutError."""
        self._socket.settimeout(timeout)
        while b"\n" not in self._buffer:
            if not self._fill_buffer():
                self.peer_closed = True
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return _decoder.decode(line)

    def _fill_buffer(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return False
        self._buffer += data
        return bool(data)

    @property
    def has_message(self) -> bool:
        """receive() has a word already, without reading the socket."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self._socket.close()


def receive_orders(fd: int, orders: type[Orders], name: str) -> tuple[ProcessPipe, Orders] | None:
    """In a child: its link and its orders, to begin with. None: there are none to carry out.

    Signals are ignored from here on: they are meant for who started us, and that one ends us.
    name: of this process, for `ps` and `top`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = ProcessPipe.from_fd(fd)
    word = link.receive()
    if not isinstance(word, orders):
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    return link, word


# Child processes see the modules that we see, whatever the folder they are started in.
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
) -> subprocess.Popen[bytes]:
    """Start `main(fd of the end, *args)` of a module in a process, with some of our sockets."""
    path = msgspec.json.encode(sys.path).decode()
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, path, module, str(end.fileno()), *args],
        pass_fds=[end.fileno(), *(one.fileno() for one in sockets)],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is for us alone
    )


class ChildProcess:
    """A process of ours and the link to it."""

    def __init__(
        self,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        sockets: Sequence[HasFileno] = (),
    ) -> None:
        """Start `main(fd of the link)` of a module, with some of our sockets, or files."""
        self.pipe, theirs = ProcessPipe.create_pair()
        with theirs:
            self.process = spawn_process(module, theirs, env=env, sockets=sockets)

    def stop(self, timeout: float = STOP_GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        if self.process.poll() is None:
            self.pipe.send(StopProcess())
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = self.kill()
        self.pipe.close()
        return status

    def kill(self) -> int:
        """End it at once."""
        self.process.kill()
        return self.process.wait()
