"""A worker process (quire.grammar.worker), seen from who hired it: one job at a time, limited."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.errors import EngineError, RequestError
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.worker import WORDS, Began, Broken, Done, Job, Start
from quire.workers.desk import Failed, Refused, TooBig
from quire.workers.watched import Gone, Hire, TooBusy, TookTooMuch, Watched

BEGIN_S = 120.0
"""Seconds of the clock until a worker knows its vocabulary."""

log = logging.getLogger(__name__)


class Crashed(EngineError):
    """The worker ended. killed: somebody else did it."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class Hired:
    """One worker. Who has it calls begin() first, and close() in the end."""

    def __init__(self, hire: Hire) -> None:
        """Start one. Raises EngineError."""
        try:
            self._worker = Watched(hire, WORDS)
        except OSError as error:
            raise EngineError(f"no process can be started to compile grammars: {error}") from error

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
            word = self._worker.begin(BEGIN_S, Start(vocabulary))
        except TooBusy:
            late = f"the process that compiles grammars does not start within {BEGIN_S:g} s"
            raise EngineError(f"{late}: this machine is too busy") from None
        except Gone as gone:
            ended = f"the process that compiles grammars ended while it started ({gone})"
            raise EngineError(f"{ended}; what it printed says why") from None
        if isinstance(word, Broken):
            raise EngineError(f"grammars cannot be compiled: {word.message}")
        if not isinstance(word, Began):
            raise EngineError(f"the process that compiles grammars began with {word!r:.80}")
        found = vocabulary or word.vocabulary
        assert found is not None, "the worker began without a vocabulary"
        return found

    def compile(self, job: Job, waits: Callable[[], None] = lambda: None) -> Done:
        """Have it compiled. waits: called now and then meanwhile.

        Raises RequestError, for what the form is to blame for, EngineError, for what our code is,
        and Crashed. The worker may be gone then: see `alive`.
        """
        began = time.monotonic()
        try:
            word = self._worker.ask(job, job.seconds, waits)
        except TookTooMuch:
            raise too_much(job) from None
        except TooBusy:
            took = time.monotonic() - began
            raise EngineError(
                f"the grammar of the structured output was not compiled within {took:.0f} s: "
                "this machine is too busy"
            ) from None
        except Gone as gone:
            ended = f"the process that compiles grammars ended ({gone})"
            raise Crashed(ended, killed=gone.killed) from None
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
        raise Crashed(f"the process that compiles grammars said {type(word).__name__}")

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def alive(self) -> bool:
        """It takes jobs."""
        return self._worker.alive

    def kill(self) -> None:
        """End the process, from any thread; who waits for it is told that it has ended."""
        self._worker.kill()

    def close(self) -> None:
        """End it. Harmless when called again."""
        self._worker.close()


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
