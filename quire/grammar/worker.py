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

import gc
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from quire.errors import RequestError
from quire.grammar import pace
from quire.grammar.pace import Allowance
from quire.grammar.vocabulary import Vocabulary
from quire.workers.limits import Limits, be_one_of_many
from quire.workers.pipe import Pipe

GROWTH = 1 << 28
"""Bytes that jobs may leave behind, all together: then the worker ends."""


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
    """A quire.grammar.closer.Least."""
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
WORDS: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


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
    be_one_of_many("quire-grammars")
    pipe = Pipe(end, WORDS)
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
        self._limits = Limits()
        self._held = self._limits.held() or 0
        self._allowance = Allowance()
        self.spoilt = False
        """Nothing more can be done here."""

    def carry_out(self, job: Job) -> Word:
        word = pace.run(lambda: self._compile(job), self._allowance, idly=True)
        gc.collect()
        if (self._limits.held() or 0) - self._held > GROWTH:
            self.spoilt = True  # another begins with less
        return word

    def _compile(self, job: Job) -> Word:
        began = time.process_time()
        try:
            self._limits.set(job.seconds, job.memory)
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
