"""A worker process (quire.grammar.worker), seen from who hired it: one job at a time, limited."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from quire.errors import EngineError, RequestError
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import (
    Began,
    Broken,
    Done,
    Failed,
    Job,
    Pipe,
    Refused,
    Start,
    TooBig,
    Word,
)

Hire = Callable[[], tuple["subprocess.Popen[bytes]", socket.socket]]
"""Starts a process that serves at the other end of the socket."""

BEGIN_S = 120.0
"""Seconds of the clock until a worker knows its vocabulary."""
WALL = 20.0
"""A job may take so many times its processor time by the clock: a worker gives way to all."""
LOOK_S = 0.5
"""How often it is looked at what a job has used."""
_TICKS = os.sysconf("SC_CLK_TCK")


log = logging.getLogger(__name__)


class Crashed(EngineError):
    """The worker ended by itself."""


class Hired:
    """One worker. Who has it calls begin() first, and close() in the end."""

    def __init__(self, hire: Hire) -> None:
        """Start one. Raises EngineError."""
        try:
            self._process, end = hire()
        except OSError as error:
            raise EngineError(f"no process can be started to compile grammars: {error}") from error
        self._pipe = Pipe(end)

    def begin(self, vocabulary: Vocabulary | None) -> Vocabulary:
        """Wait until it can work; the vocabulary, which it finds if there is none yet.

        Raises EngineError; then it is closed.
        """
        try:
            return self._begin(vocabulary)
        except BaseException:
            self.close()
            raise

    def _begin(self, vocabulary: Vocabulary | None) -> Vocabulary:
        try:
            self._pipe.send(Start(vocabulary))
            word = self._pipe.receive(BEGIN_S)
        except OSError as error:  # TimeoutError is one
            raise EngineError(
                f"the process that compiles grammars does not start: {error}"
            ) from None
        if isinstance(word, Broken):
            raise EngineError(f"grammars cannot be compiled: {word.message}")
        if not isinstance(word, Began):
            raise EngineError("the process that compiles grammars ended while it started")
        found = vocabulary or word.vocabulary
        assert found is not None, "the worker began without a vocabulary"
        return found

    def compile(self, job: Job, waits: Callable[[], None] = lambda: None) -> Done:
        """Have it compiled. waits: called now and then meanwhile.

        Raises RequestError, for what the form is to blame for, EngineError, for what our code is,
        and Crashed. The worker may be gone then: see `alive`.
        """
        try:
            self._pipe.send(job)
            word = self._answer(job, waits)
        except OSError as error:
            self.close()
            raise Crashed(f"the process that compiles grammars is gone: {error}") from None
        if isinstance(word, Done):
            return word
        if isinstance(word, Refused):
            raise RequestError(word.message, param=word.param)
        if isinstance(word, Failed):
            log.error("compiling a grammar failed: %s\n%s", word.message, word.trace)
            raise EngineError(f"compiling the grammar of structured output failed: {word.message}")
        self.close()
        if isinstance(word, TooBig):
            raise too_much(job, memory=True)
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            raise too_much(job)
        raise Crashed(f"the process that compiles grammars ended (status {status})")

    def _answer(self, job: Job, waits: Callable[[], None]) -> Word | None:
        """The answer; None if it has ended. Raises RequestError if the job took too much."""
        used, began = self._seconds(), time.monotonic()
        left = job.seconds
        while True:
            try:
                return self._pipe.receive(min(max(left, 0.01), LOOK_S))
            except TimeoutError:
                waits()
            took = time.monotonic() - began
            now = self._seconds()
            left = job.seconds - (took if now is None or used is None else now - used)
            if left <= 0:
                self.close()
                raise too_much(job)
            if took > job.seconds * WALL:
                self.close()
                raise EngineError(
                    f"the grammar of the structured output was not compiled within {took:.0f} s: "
                    "this machine is too busy"
                )

    def _seconds(self) -> float | None:
        """Processor time it has used; None where nobody says."""
        try:
            fields = (
                Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            )
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """It takes jobs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process, from any thread; who waits for it is told that it has ended."""
        self._process.kill()

    def close(self) -> None:
        """End it. Harmless when called again."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def too_much(job: Job, *, memory: bool = False) -> RequestError:
    """What to tell of a job that met a limit."""
    if memory:
        what = f"{job.memory >> 20} MiB of memory"
        option = "grammar_compile_memory"
    else:
        what = f"{job.seconds:g} s of processor time"
        option = "grammar_compile_seconds"
    return RequestError(
        f"the grammar of the structured output takes more than {what} to compile; "
        f"ask for a simpler one, or raise {option}"
    )
