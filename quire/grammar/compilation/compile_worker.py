"""Worker process that compiles grammars, isolated from the engine.

    engine                                   worker
    StartCompileWorker, once       ──▶
                                   ◀──       WorkerReady: the vocabulary is loaded
    CompileJob                     ──▶
                                   ◀──       CompileResult, JobRefused, JobOutOfMemory, JobFailed,
                                             WorkerFailed, or its end: over a limit

A process, because llguidance cannot be interrupted: `multipleOf: 2147483648` takes over 20 s.
Each message is msgpack with a length prefix; quire.grammar.compilation.worker_client is the other
side.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from quire.grammar.compilation import cpu_throttle
from quire.grammar.compilation.cpu_throttle import CpuBudget
from quire.grammar.vocabulary import Vocabulary
from quire.sandbox.limits import setup_worker_process
from quire.sandbox.pipe import WorkerPipe
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused, WorkerLoop

MAX_MEMORY_GROWTH = 1 << 28
"""Bytes that jobs may leave behind, all together: then the worker ends."""


class StartCompileWorker(msgspec.Struct, frozen=True, tag=True):
    """The first word to a worker. vocabulary: None where it is to be found by the worker."""

    vocabulary: Vocabulary | None


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """Compile this."""

    grammar: str
    backend: str
    seconds: float
    """Of processor time."""
    memory: int
    """Bytes beyond what the worker has."""


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """vocabulary: None where it came with Start."""

    vocabulary: Vocabulary | None


class CompileResult(msgspec.Struct, frozen=True, tag=True):
    """A grammar as plain data."""

    backend: str
    """Which one took it."""
    grammar_data: bytes
    min_completion: dict[str, Any]
    """A quire.grammar.length_closing.completion_plan.MinCompletion."""
    seconds: float
    """Of processor time."""


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot work at all. It ends."""

    message: str


CompileMessage = (
    StartCompileWorker
    | CompileJob
    | WorkerReady
    | CompileResult
    | JobRefused
    | JobOutOfMemory
    | JobFailed
    | WorkerFailed
)
COMPILE_DECODER: msgspec.msgpack.Decoder[CompileMessage] = msgspec.msgpack.Decoder(CompileMessage)


class SupportsCompile(Protocol):
    """Compiles forms over one vocabulary."""

    def compile(self, form: str, backend: str) -> CompileResult:
        """Raises RequestError."""
        ...


def run_worker(
    end: socket.socket,
    find: Callable[[], Vocabulary],
    begin: Callable[[Vocabulary], SupportsCompile],
) -> int:
    """Work until the other end is gone; the exit status. find: the vocabulary, if none comes."""
    setup_worker_process("quire-grammars")
    pipe = WorkerPipe(end, COMPILE_DECODER)
    start = pipe.receive()
    if not isinstance(start, StartCompileWorker):
        return 1
    try:
        vocabulary = start.vocabulary or find()
        compiles = begin(vocabulary)
    except Exception as error:  # noqa: BLE001 - the boundary: sent to the client
        with suppress(OSError):
            pipe.send(WorkerFailed(f"{type(error).__name__}: {error}"))
        return 1
    began = WorkerReady(None if start.vocabulary is not None else vocabulary)
    del start, vocabulary
    allowance = CpuBudget()
    loop = WorkerLoop(
        CompileJob,
        lambda job: _compile_job(compiles, job),
        growth=MAX_MEMORY_GROWTH,
        run=lambda work: cpu_throttle.run_throttled(work, allowance, idly=True),
    )
    return loop.serve(pipe, began)


def _compile_job(compiles: SupportsCompile, job: CompileJob) -> CompileResult:
    began = time.process_time()
    done = compiles.compile(job.grammar, job.backend)
    return msgspec.structs.replace(done, seconds=time.process_time() - began)
