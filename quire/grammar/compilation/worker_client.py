"""Client of a compile worker process: one job at a time, within limits of time and memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.errors import EngineError, RequestError
from quire.grammar.compilation.compile_worker import (
    COMPILE_DECODER,
    CompileJob,
    CompileResult,
    StartCompileWorker,
    WorkerFailed,
    WorkerReady,
)
from quire.grammar.vocabulary import Vocabulary
from quire.sandbox.worker_handle import (
    CpuTimeExceeded,
    StartWorker,
    WallTimeExceeded,
    WorkerExited,
    WorkerHandle,
)
from quire.sandbox.worker_loop import JobFailed, JobOutOfMemory, JobRefused

STARTUP_TIMEOUT_S = 120.0
"""Wall-clock seconds until a worker has loaded its vocabulary."""

log = logging.getLogger(__name__)


class CompileWorkerCrashed(EngineError):
    """The worker ended. killed: by a signal from outside."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class CompileWorkerClient:
    """One worker. Callers call begin() first and close() at the end."""

    def __init__(self, hire: StartWorker) -> None:
        """Start one. Raises EngineError."""
        try:
            self._worker = WorkerHandle(hire, COMPILE_DECODER)
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
            word = self._worker.wait_ready(STARTUP_TIMEOUT_S, StartCompileWorker(vocabulary))
        except WallTimeExceeded:
            late = (
                f"the process that compiles grammars does not start within {STARTUP_TIMEOUT_S:g} s"
            )
            raise EngineError(f"{late}: this machine is too busy") from None
        except WorkerExited as gone:
            ended = f"the process that compiles grammars ended while it started ({gone})"
            raise EngineError(f"{ended}; its output has the reason") from None
        if isinstance(word, WorkerFailed):
            raise EngineError(f"grammars cannot be compiled: {word.message}")
        if not isinstance(word, WorkerReady):
            raise EngineError(f"the process that compiles grammars began with {word!r:.80}")
        found = vocabulary or word.vocabulary
        assert found is not None, "the worker began without a vocabulary"
        return found

    def compile(self, job: CompileJob, waits: Callable[[], None] = lambda: None) -> CompileResult:
        """Have it compiled. waits: called now and then meanwhile.

        Raises RequestError, for what the form is to blame for, EngineError, for what our code is,
        and Crashed. The worker may be gone then: see `alive`.
        """
        began = time.monotonic()
        try:
            word = self._worker.run_job(job, job.seconds, waits)
        except CpuTimeExceeded:
            raise limit_exceeded_error(job) from None
        except WallTimeExceeded:
            took = time.monotonic() - began
            raise EngineError(
                f"the grammar of the structured output was not compiled within {took:.0f} s: "
                "this machine is too busy"
            ) from None
        except WorkerExited as gone:
            ended = f"the process that compiles grammars ended ({gone})"
            raise CompileWorkerCrashed(ended, killed=gone.was_killed) from None
        if isinstance(word, CompileResult):
            return word
        if isinstance(word, JobRefused):
            raise RequestError(word.message, param=word.param)
        if isinstance(word, JobFailed):
            log.error("compiling a grammar failed: %s\n%s", word.message, word.trace)
            raise EngineError(f"compiling the grammar of structured output failed: {word.message}")
        self.close()
        if isinstance(word, JobOutOfMemory):
            raise limit_exceeded_error(job, memory=True)
        raise CompileWorkerCrashed(f"the process that compiles grammars sent {type(word).__name__}")

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def alive(self) -> bool:
        """Whether the worker takes jobs."""
        return self._worker.is_alive

    def kill(self) -> None:
        """End the process, from any thread; a waiting thread gets CompileWorkerCrashed."""
        self._worker.kill()

    def close(self) -> None:
        """End it. Harmless when called again."""
        self._worker.close()


def limit_exceeded_error(job: CompileJob, *, memory: bool = False) -> RequestError:
    """The error of a job that met a limit."""
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
