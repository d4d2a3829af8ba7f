"""The worker's own side: jobs are done one at a time, each within its limits, until nobody asks.

Whatever becomes of a job is a word to who asked for it. A worker that can no longer vouch for
itself ends: a job met the limit of memory, or panicked, or jobs have left too much behind.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.errors import RequestError
from quire.workers.limits import Limits
from quire.workers.pipe import Pipe

MOST_CHARS = 2000
"""Of what is told of a fault."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was brought is at fault."""

    message: str
    param: str | None = None


class TooBig(msgspec.Struct, frozen=True, tag=True):
    """The job met the limit of memory. The worker ends."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker's own code has a fault, which this job met."""

    message: str
    trace: str


class Job(Protocol):
    """What a job may take."""

    @property
    def seconds(self) -> float:
        """Of processor time."""
        ...

    @property
    def memory(self) -> int:
        """Bytes beyond what the worker has."""
        ...


J = TypeVar("J", bound=Job)
Work = Callable[[], object]


class Desk(Generic[J]):
    """Where a worker does its jobs. Made before files are closed to it."""

    def __init__(
        self,
        kind: type[J],
        carry_out: Callable[[J], object],
        *,
        growth: int,
        run: Callable[[Work], object] = lambda work: work(),
    ) -> None:
        """carry_out: makes the word that answers a job; may raise RequestError.

        growth: bytes that jobs may leave behind, all together. run: has a job done, where and how
        it likes.
        """
        self._kind = kind
        self._carry_out = carry_out
        self._growth = growth
        self._run = run
        self._limits = Limits()
        self._held = 0
        self._spoilt = False

    def work(self, pipe: Pipe[Any], first: object) -> int:
        """Say the first word, then work until the other end is gone; the exit status."""
        gc.freeze()
        self._held = self._limits.held() or 0
        try:
            pipe.send(first)
            while isinstance(job := pipe.receive(), self._kind):
                pipe.send(self._answer(job))
                if self._spoilt:
                    return 1
        except OSError:
            return 1  # nobody is there to be told
        return 0

    def _answer(self, job: J) -> object:
        word = self._run(partial(self._outcome, job))
        gc.collect()
        if (self._limits.held() or 0) - self._held > self._growth:
            self._spoilt = True  # another begins with less
        return word

    def _outcome(self, job: J) -> object:
        try:
            self._limits.set(job.seconds, job.memory)
            return self._carry_out(job)
        except RequestError as error:
            return Refused(str(error)[:MOST_CHARS], error.param)
        except MemoryError:
            self._spoilt = True
            return TooBig()
        except BaseException as error:  # noqa: BLE001 - the border; a panic is no Exception
            self._spoilt = not isinstance(error, Exception)
            said = f"{type(error).__name__}: {error}"
            return Failed(said[:MOST_CHARS], traceback.format_exc())
