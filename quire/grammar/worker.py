"""Grammars are compiled in a process of its own, which nothing that a client sends can harm.

    engine                                   worker
    Start, once                    ──▶
                                   ◀──       Began: it knows the vocabulary
    Job                            ──▶
                                   ◀──       Done, Refused, Failed, or its end: it took too much

Each word is msgpack behind its length. This is the worker's side and the words; quire.grammar.hired
has the other side. Who it is that compiles is said by whoever starts it.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire.errors import RequestError
from quire.grammar import pace
from quire.grammar.pace import Allowance
from quire.grammar.vocabulary import Vocabulary

FIRST_TO_DIE = b"800"
"""Where memory runs out: rather this process than others."""
GROWTH = 1 << 28
"""Bytes that jobs may leave behind, all together: then the worker ends."""
LONGEST = 1 << 30
"""Bytes of a word."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first word to a worker. vocabulary: None where it is to be found by the worker."""

    vocabulary: Vocabulary | None


class Job(msgspec.Struct, frozen=True, tag=True):
    """Compile this."""

    form: str
    backend: str
    seconds: float
    """Of processor time."""
    memory: int
    """Bytes beyond what the worker has."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """vocabulary: None where it came with Start."""

    vocabulary: Vocabulary | None


class Done(msgspec.Struct, frozen=True, tag=True):
    """A grammar as plain data."""

    backend: str
    """Which one took it."""
    dumped: bytes
    least: dict[str, Any]
    """A quire.grammar.closing.Least."""
    seconds: float
    """Of processor time."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The form is at fault."""

    message: str
    param: str | None = None


class TooBig(msgspec.Struct, frozen=True, tag=True):
    """The job met the limit of memory. The worker ends."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What compiles has a fault, which this form met."""

    message: str
    trace: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot work at all. It ends."""

    message: str


Word = Start | Job | Began | Done | Refused | TooBig | Failed | Broken
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


class Pipe:
    """One end of the connection. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = bytearray()

    def send(self, word: Word) -> None:
        """Raises OSError if the other end is gone."""
        data = _encoder.encode(word)
        self._socket.settimeout(None)
        self._socket.sendall(struct.pack("!I", len(data)) + data)

    def receive(self, timeout: float | None = None) -> Word | None:
        """The next word. None: the other end is gone, or says what cannot be. Raises TimeoutError,
        and what has come by then is kept.
        """
        self._socket.settimeout(timeout)
        size = self._size()
        while size is None or len(self._rest) < 4 + size:
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not data:
                return None
            self._rest += data
            size = self._size()
            if size is not None and size > LONGEST:
                return None
        data = bytes(self._rest[4 : 4 + size])
        del self._rest[: 4 + size]
        try:
            return _decoder.decode(data)
        except msgspec.DecodeError:
            return None

    def _size(self) -> int | None:
        return struct.unpack("!I", self._rest[:4])[0] if len(self._rest) >= 4 else None

    def close(self) -> None:
        self._socket.close()


class Compiles(Protocol):
    """Compiles forms over one vocabulary."""

    def compile(self, form: str, backend: str) -> Done:
        """Raises RequestError."""
        ...


def serve(
    end: socket.socket,
    find: Callable[[], Vocabulary],
    begin: Callable[[Vocabulary], Compiles],
) -> int:
    """Work until the other end is gone; the exit status. find: the vocabulary, if none comes."""
    _be_one_of_many()
    pipe = Pipe(end)
    try:
        start = pipe.receive()
        if not isinstance(start, Start):
            return 1
        try:
            vocabulary = start.vocabulary or find()
            compiles = begin(vocabulary)
        except Exception as error:  # noqa: BLE001 - the border: it goes to who asked
            pipe.send(Broken(f"{type(error).__name__}: {error}"))
            return 1
        pipe.send(Began(None if start.vocabulary is not None else vocabulary))
        del start, vocabulary
        gc.freeze()
        desk = _Desk(compiles)
        while isinstance(job := pipe.receive(), Job):
            pipe.send(desk.carry_out(job))
            if desk.spoilt:
                return 1
    except OSError:
        return 1  # nobody is there to be told
    return 0


class _Desk:
    """Where jobs are done, one at a time."""

    def __init__(self, compiles: Compiles) -> None:
        self._compiles = compiles
        self._held = _held() or 0
        self._allowance = Allowance()
        self.spoilt = False
        """Nothing more can be done here."""

    def carry_out(self, job: Job) -> Word:
        word = pace.run(lambda: self._compile(job), self._allowance)
        gc.collect()
        if (_held() or 0) - self._held > GROWTH:
            self.spoilt = True  # another begins with less
        return word

    def _compile(self, job: Job) -> Word:
        began = time.process_time()
        try:
            _limit(job)
            done = self._compiles.compile(job.form, job.backend)
        except RequestError as error:
            return Refused(str(error), error.param)
        except MemoryError:
            self.spoilt = True
            return TooBig()
        except BaseException as error:  # noqa: BLE001 - the border; a panic is no Exception
            self.spoilt = not isinstance(error, Exception)
            return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
        return msgspec.structs.replace(done, seconds=time.process_time() - began)


def _limit(job: Job) -> None:
    """Have the system stop what takes too much, also when nobody watches any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime + job.seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
    held = _held()
    if held is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + job.memory, resource.RLIM_INFINITY))


def _held() -> int | None:
    """Bytes of private memory that this process has; None where nobody says."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) * 1024
    return None


def _be_one_of_many() -> None:
    """Leave signals to who started us, be the first to go, and end with who started us."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for who started us
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_DIE)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("quire-grammars")
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
