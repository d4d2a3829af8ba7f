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

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from quire.grammar import pace
from quire.grammar.pace import Allowance
from quire.grammar.vocabulary import Vocabulary
from quire.workers.desk import Desk, Failed, Refused, TooBig
from quire.workers.limits import be_one_of_many
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
    start = pipe.receive()
    if not isinstance(start, Start):
        return 1
    try:
        vocabulary = start.vocabulary or find()
        compiles = begin(vocabulary)
    except Exception as error:  # noqa: BLE001 - the border: it goes to who asked
        with suppress(OSError):
            pipe.send(Broken(f"{type(error).__name__}: {error}"))
        return 1
    began = Began(None if start.vocabulary is not None else vocabulary)
    del start, vocabulary
    allowance = Allowance()
    desk = Desk(
        Job,
        lambda job: _compiled(compiles, job),
        growth=GROWTH,
        run=lambda work: pace.run(work, allowance, idly=True),
    )
    return desk.work(pipe, began)


def _compiled(compiles: Compiles, job: Job) -> Done:
    began = time.process_time()
    done = compiles.compile(job.form, job.backend)
    return msgspec.structs.replace(done, seconds=time.process_time() - began)
