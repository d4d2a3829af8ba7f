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

from quire.config.config import EngineConfig
from quire.engine.messages import Fault

GRACE_S = 5.0
"""Time to end by oneself before one is killed."""

W = TypeVar("W", bound="Word")


class HasFileno(Protocol):
    """A socket, a file."""

    def fileno(self) -> int: ...


class Word(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all."""


class RunEngine(Word, frozen=True):
    """To an engine process: its orders."""

    options: dict[str, Any]  # of quire.config.options, flat, as far as they were changed
    folder: str  # where its socket goes; removed with everything in it
    log_level: str
    log_style: str = "text"
    server: bool = True
    askers: int | None = None  # how many will connect, once each; None: any number, at any time
    aboard: int | None = None  # file descriptor of a page of quire.engine.aboard
    pulse: int | None = None  # and of one of quire.engine.pulse
    stacks: int | None = None  # and of a file for stacks, when it hangs or dies
    ring: int | None = None  # and of one for quire.engine.recorder


class Found(Word, frozen=True):
    """From an engine process: the model is found, and its weights are being read.

    tokenizer: its folder; None if there is to be none. config: but for the number of blocks.
    """

    config: EngineConfig
    tokenizer: str | None


class Built(Word, frozen=True):
    """From an engine process: it takes requests."""

    config: EngineConfig
    seconds: dict[str, float]  # what its start was spent on: quire.engine.receipt


class RunServer(Word, frozen=True):
    """To an API process: its orders. sockets: file descriptors it was started with."""

    options: dict[str, Any]  # of quire.server.options
    folder: str  # what API processes share
    index: int
    count: int
    sockets: list[int]
    log_level: str
    engine: str = ""  # the engine's folder
    name: str = ""  # what the engine knows it by; no two processes have the same
    birth: int = 0  # how many processes had this index before
    restarts: int = 0  # how many engines have taken over so far
    pulse: int | None = None  # file descriptor of the engine's page: quire.engine.pulse
    beat: int | None = None  # and of the page of this process
    stacks: int | None = None  # and of a file for stacks, when it hangs or dies
    condemned: tuple[tuple[bytes, float], ...] = ()  # fingerprints, and for how many seconds yet


class Listening(Word, frozen=True):
    """From an API process: it answers. welcome: what to tell people."""

    welcome: str


class Failed(Word, frozen=True):
    """From any: it cannot do what it was started for."""

    fault: Fault


class Away(Word, frozen=True):
    """To an API process: the engine is gone, and another is being started.

    aboard: ids of the requests that ran there, as far as is known. None: it may have been any.
    """

    why: str
    expected_s: float  # what a start took the last time
    aboard: list[str] | None = None


class Back(Word, frozen=True):
    """To an API process: another engine takes requests, at a socket in this folder."""

    folder: str


class Left(Word, frozen=True):
    """To an engine process: who called itself so is gone, and wants nothing any more."""

    name: str


class Restart(Word, frozen=True):
    """From any: the engine is of no use any more. End it at once, and start another."""

    reason: str


class Condemned(Word, frozen=True):
    """From an API process, and on to the others: inputs with this fingerprint are not tried again
    for a while.
    """

    fingerprint: bytes


class Died(Word, frozen=True):
    """To an API process: the engine is gone for good, or other parts of the server are."""

    why: str


class Stop(Word, frozen=True):
    """To any: end well, now."""


Any_ = (
    RunEngine
    | Found
    | Built
    | RunServer
    | Listening
    | Failed
    | Away
    | Back
    | Left
    | Restart
    | Condemned
    | Died
    | Stop
)


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{value!r} works in one process only")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder: msgspec.json.Decoder[Any_] = msgspec.json.Decoder(Any_)


class Link:
    """One end. Not for several threads at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self.ended = False
        """receive() has found the other end gone."""

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """A link, and the end to give away."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> Link:
        """The end that this process was started with."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, word: Word) -> None:
        """Say something; to one who is gone, nothing. Raises TypeError for what cannot travel."""
        line = _encoder.encode(word) + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            return  # whoever reads our end will be told that it is gone

    def offer(self, word: Word) -> bool:
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

    def receive(self, timeout: float | None = None) -> Any_ | None:
        """The next word, waited for. None: the other end is gone. Raises TimeoutError."""
        self._socket.settimeout(timeout)
        while b"\n" not in self._rest:
            if not self._more():
                self.ended = True
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return _decoder.decode(line)

    def _more(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return False
        self._rest += data
        return bool(data)

    @property
    def has_word(self) -> bool:
        """receive() has a word already, without reading the socket."""
        return b"\n" in self._rest

    def close(self) -> None:
        self._socket.close()


def inherit(fd: int, orders: type[W], name: str) -> tuple[Link, W] | None:
    """In a child: its link and its orders, to begin with. None: there are none to carry out.

    Signals are ignored from here on: they are meant for who started us, and that one ends us.
    name: of this process, for `ps` and `top`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link.inherited(fd)
    word = link.receive()
    if not isinstance(word, orders):
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    return link, word


# Child processes see the modules that we see, whatever the folder they are started in.
_BOOT = """
import importlib, json, sys
path, module, fd, *args = sys.argv[1:]
sys.path[:] = json.loads(path)
sys.exit(importlib.import_module(module).main(int(fd), *args))
"""


def start(
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
        [sys.executable, "-c", _BOOT, path, module, str(end.fileno()), *args],
        pass_fds=[end.fileno(), *(one.fileno() for one in sockets)],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is for us alone
    )


class Child:
    """A process of ours and the link to it."""

    def __init__(
        self,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        sockets: Sequence[HasFileno] = (),
    ) -> None:
        """Start `main(fd of the link)` of a module, with some of our sockets, or files."""
        self.link, theirs = Link.pair()
        with theirs:
            self.process = start(module, theirs, env=env, sockets=sockets)

    def stop(self, timeout: float = GRACE_S) -> int:
        """Have it end; kill it if it does not in time. Its exit status."""
        if self.process.poll() is None:
            self.link.send(Stop())
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = self.kill()
        self.link.close()
        return status

    def kill(self) -> int:
        """End it at once."""
        self.process.kill()
        return self.process.wait()
