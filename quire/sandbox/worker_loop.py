"""Job loop of a worker: runs one job at a time, each within its limits, until the parent ends.

Every outcome of a job is a message to the parent. A worker that can no longer be trusted ends: a
job reached the memory limit, or panicked, or jobs have leaked too much memory.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.errors import RequestError
from quire.sandbox.limits import ResourceLimits
from quire.sandbox.pipe import WorkerPipe

MAX_ERROR_CHARS = 2000
"""Maximum length of an error message."""


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """The input of the job is invalid."""

    message: str
    param: str | None = None


class JobOutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """The job reached the memory limit. The worker ends."""


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker's own code failed on this job."""

    message: str
    trace: str


class SandboxJob(Protocol):
    """Limits of a job."""

    @property
    def seconds(self) -> float:
        """Limit of processor time."""
        ...

    @property
    def memory(self) -> int:
        """Limit of memory in bytes, beyond what the worker has."""
        ...


J = TypeVar("J", bound=SandboxJob)
JobThunk = Callable[[], object]


class WorkerLoop(Generic[J]):
    """Runs the jobs of a worker. Made before Landlock closes files."""

    def __init__(
        self,
        kind: type[J],
        carry_out: Callable[[J], object],
        *,
        growth: int,
        run: Callable[[JobThunk], object] = lambda work: work(),
    ) -> None:
        """carry_out: returns the message that answers a job; may raise RequestError.

        growth: bytes that jobs may leak in all. run: calls a job's function, in any thread.
        """
        self._job_type = kind
        self._execute = carry_out
        self._max_growth_bytes = growth
        self._run = run
        self._limits = ResourceLimits()
        self._initial_bytes = 0
        self._must_exit = False

    def serve(self, pipe: WorkerPipe[Any], first: object) -> int:
        """Send the first message, then run jobs until the pipe closes. Returns the exit status."""
        gc.freeze()
        self._initial_bytes = self._limits.data_bytes() or 0
        try:
            pipe.send(first)
            while isinstance(job := pipe.receive(), self._job_type):
                pipe.send(self._run_job(job))
                if self._must_exit:
                    return 1
        except OSError:
            return 1  # the parent has ended
        return 0

    def _run_job(self, job: J) -> object:
        word = self._run(partial(self._execute_limited, job))
        gc.collect()
        if (self._limits.data_bytes() or 0) - self._initial_bytes > self._max_growth_bytes:
            self._must_exit = True  # the next worker starts with less memory
        return word

    def _execute_limited(self, job: J) -> object:
        try:
            self._limits.set(job.seconds, job.memory)
            return self._execute(job)
        except RequestError as error:
            return JobRefused(str(error)[:MAX_ERROR_CHARS], error.param)
        except MemoryError:
            self._must_exit = True
            return JobOutOfMemory()
        except BaseException as error:  # noqa: BLE001 - isolates the job; a panic is no Exception
            self._must_exit = not isinstance(error, Exception)
            message = f"{type(error).__name__}: {error}"
            return JobFailed(message[:MAX_ERROR_CHARS], traceback.format_exc())
